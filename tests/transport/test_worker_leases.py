"""KV under lease for a real reader process that hangs."""

import asyncio
import signal
from functools import partial
from pathlib import Path

import pytest

from shared.ids import WorkerId
from shared.messages.router_worker import Expect
from tests.conftest import RunAsync
from tests.transport.test_worker_processes import LONG, PAIR, Runner, losses, recover, reference
from tests.transport.worker_rig import make_config, request, rig


@pytest.fixture
def run(run_async: RunAsync) -> Runner:
    return partial(run_async, timeout=110.0)


def test_a_decode_worker_that_sleeps_past_its_lease_costs_that_transfer_only(
    run: Runner, model: Path, directory: Path
) -> None:
    """Guards KV held for ever for a reader that hangs, and its use after it was let go (12, 19)."""
    transfer = {"notify_layers": 1, "lease": "1500ms", "heartbeat": "300ms"}

    async def check() -> None:
        config = make_config(directory, model, split=True, transfer=transfer)
        right = await asyncio.to_thread(reference, model, LONG, 6)
        async with rig(config, *PAIR) as router:
            prefill, decode = (router.hellos[WorkerId(name)][0] for name in PAIR)
            for number, subscribed in enumerate((True, False), start=1):
                first, second = router.next_dispatch(), router.next_dispatch()
                work, source = request(LONG, 6), router.source("prefill-0", first)
                if not subscribed:
                    router.processes["decode-0"].send_signal(signal.SIGSTOP)
                router.send("decode-0", Expect(dispatch=second, request=work, source=source))
                if subscribed:
                    await router.until(lambda: router.waiting(decode) == 1)
                    router.processes["decode-0"].send_signal(signal.SIGSTOP)
                router.send("prefill-0", router.prefill_message(first, work))
                await router.until(partial(router.counted, prefill, "leases_expired", number))
                load = await router.settled("prefill-0")
                assert load.blocks_leased == load.blocks_active == 0
                assert first in router.prefilled and second not in router.ended
                router.processes["decode-0"].send_signal(signal.SIGCONT)
                await recover(router, second, "prefill-0")
                assert await router.output(second) == right
            for worker in PAIR:
                load = await router.settled(worker)
                assert load.blocks_free + load.blocks_cached == load.blocks_total
            assert "its lease expired" in losses(router)[-1].error.message
            (reader,) = router.reports[prefill].readers
            assert (reader.reader, reader.leases_expired) == ("decode-0", 2)
        assert "decode-0 neither fetched its KV (transfer 1)" in router.logs["prefill-0"]

    run(check())
