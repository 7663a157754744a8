"""``make soak``: 100,000 KV fetches over the worst wire, with every invariant checked.

Too long for every test run, which does 10,000 of the same.
"""

import sys

from shared.transport.bulk.fetches import Done, FetchLimits
from tests.unit.bulk_world import live
from tests.unit.test_bulk_machines import check_end

JOBS_PER_LIFE = 500


def main(jobs: int = 100_000) -> None:
    done = failed = spoiled = again = 0
    for seed in range(jobs // JOBS_PER_LIFE):
        limits = FetchLimits(slots=1 + seed % 8, stall=1.0, attempts=1 + seed % 4)
        wire = live(seed, JOBS_PER_LIFE, limits)
        check_end(wire)
        outcomes = [o for o in wire.outcomes.values() if isinstance(o, Done)]
        done += len(outcomes)
        failed += len(wire.outcomes) - len(outcomes)
        again += sum(outcome.again for outcome in outcomes)
        spoiled += wire.reader.spoiled
    print(
        f"{done + failed} fetches: {done} arrived intact, {failed} failed by name, "
        f"{spoiled} chunks spoiled, {again} asked for again, 0 leaked, 0 wrong bytes"
    )


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
