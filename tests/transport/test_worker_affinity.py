"""A worker's threads run on its own cores, whichever of them started when."""

import os
from pathlib import Path

from tests.conftest import RunAsync
from tests.transport.worker_rig import make_config, rig


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
        async with rig(config, "mixed-0") as router:
            pid = router.processes["mixed-0"].pid
            threads = tasks_of(pid)
            assert len(threads) > 2
            assert {thread: os.sched_getaffinity(thread) for thread in threads} == {
                thread: {mine} for thread in threads
            }

    run_async(check(), timeout=110.0)
