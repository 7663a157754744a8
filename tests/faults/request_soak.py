"""``make soak``: thousands of short requests with cancels through the default deployment.

Too long for every test run, which does 200 of the same. What every process holds is measured
between rounds: descriptors and threads must not grow at all, memory only until caches are full.
"""

import asyncio
import sys
from pathlib import Path

import yaml

import diptych
from tests.system.crowd import Holding, crowd, settled
from tests.system.fleet import Fleet

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "local.yaml"
ROUNDS = 4
GROWTH = 4096, 0.03
"""KiB, or share of what it had, that a process may grow from the second to the last round.

A leak of 4 KiB a request shows; allocators and the engine's shapes settle later than that.
"""


def main(requests: int = 2000) -> None:
    tree = yaml.safe_load(CONFIG.read_text())
    del tree["gateway"]["http"]
    fleet = Fleet(tree)
    try:
        fleet.start()
        with diptych.Client(fleet.client_endpoint) as client:
            rounds = [settled(fleet, client, {})]
            for number in range(ROUNDS):
                ends = asyncio.run(crowd(fleet, requests // ROUNDS, number))
                print(f"round {number + 1}: {dict(ends)}", flush=True)
                assert not set(ends) - {"200", "left"}, ends
                files = {name: held.files for name, held in rounds[min(number, 1)].items()}
                rounds.append(settled(fleet, client, files))
            status = fleet.wait_idle(client)
        show(rounds)
        check(rounds)
        for worker in status["workers"]:
            load = worker["load"]
            assert load["blocks_free"] + load["blocks_cached"] == load["blocks_total"], load
        assert set(fleet.stop().values()) == {0}
        print("all blocks are free or cached, every process ended in order")
    finally:
        fleet.stop()
        fleet.remove()


def show(rounds: list[dict[str, Holding]]) -> None:
    for name in rounds[0]:
        held = [each[name] for each in rounds]
        print(
            f"{name:10}",
            "MiB",
            " ".join(f"{h.anonymous / 1024:7.1f}" for h in held),
            "fds",
            *(h.files for h in held),
            "threads",
            *(h.threads for h in held),
        )


def check(rounds: list[dict[str, Holding]]) -> None:
    second, last = rounds[2], rounds[-1]
    for name, held in last.items():
        before = second[name]
        assert held.files <= before.files, f"{name} has more open files"
        assert held.threads <= before.threads, f"{name} has more threads"
        most = max(GROWTH[0], GROWTH[1] * before.anonymous)
        assert held.anonymous - before.anonymous <= most, f"{name} has grown"


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
