"""A worker's threads run on its own cores, whichever of them started when."""

import os
from pathlib import Path

import pytest

from shared.ids import WorkerId
from shared.kernels.load import native
from tests.conftest import RunAsync
from tests.transport.worker_rig import make_config, request, rig


def tasks_of(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def test_every_thread_of_a_worker_stays_on_its_cores(
    run_async: RunAsync, model: Path, directory: Path
) -> None:
    """Guards: prefill on decode's cores, for a library started threads before the worker chose."""
    mine = max(os.sched_getaffinity(0))
    mixed = {"count": 1, "precision": "fp32", "kv_memory": "4MiB", "cores": [[mine]]}
    config = make_config(directory, model, split=False, workers={"mixed": mixed})

    async def check() -> None:
        async with rig(config, "mixed-0", launch=("-m",)) as router:  # with its own imports
            pid = router.processes["mixed-0"].pid
            threads = tasks_of(pid)
            assert len(threads) > 2
            assert {thread: os.sched_getaffinity(thread) for thread in threads} == {
                thread: {mine} for thread in threads
            }

    run_async(check(), timeout=110.0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="takes two CPUs")
@pytest.mark.parametrize("borrow", [True, False])
def test_prefill_computes_on_the_core_of_a_decode_worker_without_work(
    run_async: RunAsync, model: Path, directory: Path, borrow: bool
) -> None:
    """A prompt that comes alone was read by one core while the other did nothing."""
    section = {"count": 1, "precision": "fp32", "kv_memory": "4MiB", "borrow_cores": borrow}
    roles = {"prefill": section, "decode": section}
    config = make_config(directory, model, split=True, workers=roles)

    async def check() -> None:
        async with rig(config, "prefill-0", "decode-0") as router:
            _, dispatch = router.split(request(tuple(range(1, 30)), 4))
            await router.output(dispatch)
            peer, _ = router.hellos[WorkerId("prefill-0")]
            await router.until(lambda: router.counter(peer, "steps") > 0)  # not an earlier report
            await router.settled("prefill-0")
            counters = router.reports[peer].counters
            assert (counters.borrowing_steps > 0) == borrow
            assert counters.steps >= counters.borrowing_steps
            sets = [
                {frozenset(os.sched_getaffinity(t)) for t in tasks_of(router.processes[name].pid)}
                for name in ("prefill-0", "decode-0")
            ]
            if native():
                assert len(sets[0]) == 1 + borrow
                assert (sets[1] <= sets[0]) == borrow

    run_async(check(), timeout=110.0)
