"""Real worker processes whose KV is in GPUs' memory, by a stand-in for CUDA: split = unsplit."""

from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path

import pytest

from shared.ids import WorkerId
from tests.conftest import RunAsync
from tests.transport.test_worker_host_path import gone, nothing_is_left, pair_of
from tests.transport.test_worker_processes import LONG, PAIR, prompts, recover, reference
from tests.transport.worker_rig import make_config, request, rig

Runner = Callable[[Coroutine[object, object, None]], None]
FAKE = ("-m", "tests.transport.fake_gpu_worker")
WORKER = {
    "count": 1,
    "precision": "fp32",
    "kv_memory": "4MiB",
    "max_batch_tokens": 32,
    "threads": 1,
}


@pytest.fixture
def run(run_async: RunAsync) -> Runner:
    return partial(run_async, timeout=110.0)


def test_a_pair_on_gpus_equals_the_reference_also_after_a_kill(
    run: Runner, model: Path, directory: Path
) -> None:
    """Guards wrong tokens by CUDA IPC, KV of a dead process, and leases left behind (29, 37, 79).

    The first source is killed between a copy and its check: its memory may be anybody's then.
    """
    workers = {
        "prefill": WORKER | {"device": "cuda:0", "count": 2},
        "decode": WORKER | {"device": "cuda:1"},
    }
    faults = {"copies": [{"kind": "kill_source", "copy": 9}]}
    config = make_config(directory, model, split=True, workers=workers, faults=faults)

    async def check() -> None:
        async with rig(config, *PAIR, "prefill-1", launch=FAKE) as router:
            _, second = router.split(request(LONG, 6))
            await gone(router, "prefill-0")
            await recover(router, second, "prefill-1")
            assert await router.output(second) == reference(model, LONG, 6)
            for prompt in prompts():
                _, second = router.split(request(prompt, 8), prefill="prefill-1")
                assert await router.output(second) == reference(model, prompt, 8)
            await nothing_is_left(router, "decode-0", "prefill-1")
            peer = router.hellos[WorkerId("decode-0")][0]
            # Counters of pairs come with the next report, later than the load that is settled.
            last = router.reports[peer]
            await router.until(lambda: router.reports[peer] is not last)
            pair = next(p for p in router.reports[peer].pairs if p.source == "prefill-1")
            assert (pair.path, pair.reason) == ("ipc", "self_test")
            assert pair.transfers == 1 + len(prompts()) and pair.failed == 0

    run(check())


def test_a_gpu_and_a_cpu_equal_the_reference(run: Runner, model: Path, directory: Path) -> None:
    """Guards blocks that differ between memories, and slabs that are never free again (37)."""
    workers = {"prefill": WORKER | {"device": "cuda:0"}, "decode": WORKER | {"device": "cpu"}}
    transfer = {"chunk_size": "4KiB", "window": 2}
    config = make_config(directory, model, split=True, workers=workers, transfer=transfer)

    async def check() -> None:
        async with rig(config, *PAIR, launch=FAKE) as router:
            work = [(router.split(request(prompt, 8))[1], prompt) for prompt in prompts()]
            for second, prompt in work:
                assert await router.output(second) == reference(model, prompt, 8)
            await nothing_is_left(router, *PAIR)
            pair = await pair_of(router)
            assert (pair.path, pair.reason) == ("host", "mixed_memory")
            assert pair.transfers == len(work) and pair.failed == 0 and pair.bytes > 0

    run(check())
