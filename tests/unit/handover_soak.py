"""``make soak``: 100,000 KV hand-overs with leases and tokens, in lives full of trouble.

Whole workers' machines with an engine whose tokens betray any wrong KV; processes are killed,
requests aborted, messages delayed, lost, doubled and overtaken, copies and steps fail. Every life
ends with ``check_end``: no block leaked, no token wrong. Every test run lives a few of them. Ctrl-C
ends it early, with what was counted.
"""

import random
import sys
import time
from collections import Counter
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from shared.messages.fleet import PipelineRule
from tests.unit.test_worker_random import BLOCKS, WINDOWS, live

TAPE = 8000
RULES: tuple[PipelineRule, ...] = ("auto", True, False)


def main(handovers: int = 100_000) -> None:
    begun = time.monotonic()
    sums: Counter[str] = Counter()
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("hand-overs", total=handovers)
        with suppress(KeyboardInterrupt):
            while sums["handed over"] < handovers:
                sums += life(sums["lives"])
                progress.update(bar, completed=min(sums["handed over"], handovers))
    seconds = time.monotonic() - begun
    counted = ", ".join(f"{count:,} {what}" for what, count in sums.items())
    print(f"{counted}; 0 leaked blocks, 0 wrong tokens, {seconds:.0f} s")


def life(number: int) -> Counter[str]:
    """Live once and return what happened."""
    dice = random.Random(f"handover soak {number}")
    tape = [dice.randrange(2**20) for _ in range(TAPE)]
    router = live(tape, WINDOWS if number % 2 else (), RULES[number % 3])
    counters = router.lives.values()
    states = Counter(open_.state for open_ in router.requests)
    return Counter(
        {
            "handed over": sum(one.transfers_ok for one in counters),
            "given up by name": sum(one.transfers_failed for one in counters),
            "lives": 1,
            "processes killed": len(router.lives) - len(BLOCKS),
            "requests aborted": states["cancelled"],
            "streams complete": states["finished"],
            "leases expired": sum(one.leases_expired for one in counters),
            **{f"messages {what}": count for what, count in router.world.harm.items()},
        }
    )


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
