"""Real worker processes whose KV is read by NIXL; skipped visibly where it is not installed."""

from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path

import pytest

from shared.errors import ResourceMissing
from shared.transport.bulk.nixl import load_library
from tests.conftest import RunAsync
from tests.transport.test_worker_host_path import gone, nothing_is_left, pair_of
from tests.transport.test_worker_processes import LONG, PAIR, prompts, recover, reference
from tests.transport.worker_rig import make_config, request, rig

Runner = Callable[[Coroutine[object, object, None]], None]
NIXL = {"path": "nixl", "notify_layers": 1, "lease": "4s", "heartbeat": "500ms"}

try:
    load_library()
    MISSING = ""
except ResourceMissing as error:
    MISSING = error.message

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"pip install .[nixl]: {MISSING}")


@pytest.fixture
def run(run_async: RunAsync) -> Runner:
    return partial(run_async, timeout=110.0)


def test_a_pair_over_nixl_equals_the_reference(run: Runner, model: Path, directory: Path) -> None:
    """Guards split = unsplit for reads by address (32, 37, 40)."""

    async def check() -> None:
        config = make_config(directory, model, split=True, transfer=NIXL)
        async with rig(config, *PAIR) as router:
            work = [(router.split(request(prompt, 12)), prompt) for prompt in prompts() * 2]
            for (_, second), prompt in work:
                assert await router.output(second) == reference(model, prompt, 12)
            await nothing_is_left(router, *PAIR)
            pair = await pair_of(router)
            assert (pair.path, pair.reason) == ("nixl", "configured")
            assert pair.transfers == len(work) and pair.failed == 0 < pair.bytes

    run(check())


def test_a_source_killed_under_nixl_is_replaced(run: Runner, model: Path, directory: Path) -> None:
    """Guards reads of a dead process's memory, and waits for it (1, 14)."""

    async def check() -> None:
        config = make_config(directory, model, split=True, transfer=NIXL)
        right = reference(model, LONG, 6)
        async with rig(config, "prefill-0", "prefill-1", "decode-0") as router:
            _, second = router.split(request(LONG, 6), prefill="prefill-0")
            await router.until(lambda: bool(router.reports))
            router.processes["prefill-0"].kill()
            await gone(router, "prefill-0")
            await recover(router, second, "prefill-1")
            assert await router.output(second) == right
            await nothing_is_left(router, "prefill-1", "decode-0")

    run(check())
