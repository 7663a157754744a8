"""``make soak``: a hundred random kills under load; too long for every test run, which does 20."""

import sys

from tests.faults.test_kills_under_load import kept_fleet, kill_at_random
from tests.system.conftest import read_golden


def main(kills: int = 100) -> None:
    fleet = kept_fleet()
    try:
        fleet.start()
        fleet.keep()
        kill_at_random(fleet, read_golden(), kills)
    finally:
        fleet.stop()
        fleet.remove()
    print(f"{kills} kills: every stream complete and equal to the reference")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
