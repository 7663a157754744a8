"""Real worker processes whose KV goes over sockets, with and without harm on the way."""

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shared.ids import WorkerId
from shared.messages.fleet import PairStatus
from shared.messages.router_worker import TransferLost
from tests.conftest import RunAsync
from tests.transport.test_worker_processes import LONG, PAIR, prompts, recover, reference
from tests.transport.worker_rig import Rig, make_config, request, rig

Runner = Callable[[Coroutine[object, object, None]], None]
HOST = {"path": "host", "notify_layers": 1, "lease": "4s", "heartbeat": "500ms"}
SMALL = {**HOST, "chunk_size": "4KiB", "window": 2, "stall_timeout": "300ms"}
ELSEWHERE = "host" if find_spec("nixl") else "nixl"
KINDS = ("delay", "drop", "duplicate", "reorder", "corrupt", "truncate", "stall")


@pytest.fixture
def run(run_async: RunAsync) -> Runner:
    return partial(run_async, timeout=110.0)


def free_ports(count: int) -> int:
    """Return the first of ``count`` free ports in a row, below those that connections take."""
    while True:
        first = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return first


async def pair_of(router: Rig, reader: str = "decode-0") -> PairStatus:
    peer = router.hellos[WorkerId(reader)][0]
    await router.until(lambda: peer in router.reports and bool(router.reports[peer].pairs))
    return router.reports[peer].pairs[0]


async def nothing_is_left(router: Rig, *workers: str) -> None:
    for worker in workers:
        load = await router.settled(worker)
        assert load.blocks_free + load.blocks_cached == load.blocks_total


@pytest.mark.parametrize(
    ("transfer", "over"),
    [
        ({**SMALL, "stall_timeout": "15s"}, "ipc"),
        ({**HOST, "pipeline": True}, "tcp"),
        ({**HOST, "pipeline": False, "path": ELSEWHERE}, "tcp"),
        ({**HOST, "pipeline": "auto", "notify_layers": "auto", "sockets": 3}, "tcp"),
    ],
)
def test_a_pair_over_sockets_equals_the_reference(
    run: Runner, model: Path, directory: Path, transfer: dict[str, Any], over: str
) -> None:
    """Guards split = unsplit for the path between machines, layer-wise or not (37, 40).

    Where NIXL is missing it is asked for once: guards a silent fallback, and workers that do not
    start for want of an extra (46).
    """
    changes: dict[str, object] = {"transfer": transfer}
    if over == "tcp":
        changes["endpoints"] = {"kv": f"tcp://127.0.0.1:{free_ports(8)}"}

    async def check() -> None:
        config = make_config(directory, model, split=True, **changes)
        async with rig(config, *PAIR) as router:
            await router.output(router.split(request(LONG[:40], 12))[1])  # the path is known
            work = [(router.split(request(prompt, 12)), prompt) for prompt in prompts() * 2]
            for (_, second), prompt in work:
                assert await router.output(second) == reference(model, prompt, 12)
            await nothing_is_left(router, *PAIR)
            pair = await pair_of(router)
            rule = transfer.get("pipeline", "auto")
            fewest, most = {True: (19, 19), False: (0, 0), "auto": (1, 18)}[rule]
            assert fewest <= pair.pipelined <= most
            reason = "nixl_missing" if transfer["path"] == "nixl" else "configured"
            assert (pair.path, pair.reason) == ("host", reason)
            assert pair.transfers == len(work) + 1 and pair.failed == pair.chunks_again == 0
            assert pair.bytes > 0

    run(check())


def test_faults_on_the_way_change_no_token(run: Runner, model: Path, directory: Path) -> None:
    """Guards wrong tokens, leaks and hangs on a bad network (24, 25, 29, 32, 36, 41)."""

    async def check() -> None:
        faults = [{"kind": kind, "probability": 0.01, "delay": "150ms"} for kind in KINDS]
        config = make_config(
            directory, model, split=True, transfer=SMALL, faults={"chunks": faults}
        )
        right = reference(model, LONG[:400], 6)
        async with rig(config, *PAIR) as router:
            works = [router.split(request(LONG[:400], 6))[1] for _ in range(3)]
            for second in works:
                assert await router.output(second) == right
            await nothing_is_left(router, *PAIR)
            peer = router.hellos[WorkerId("decode-0")][0]
            await router.until(lambda: router.counter(peer, "chunks_spoiled") > 0)
            pair = await pair_of(router)
            assert pair.chunks_again > 0 and pair.chunks_spoiled > 0

    run(check())


def test_killed_at_chunk_i_another_source_takes_over(
    run: Runner, model: Path, directory: Path
) -> None:
    """Guards half a transfer being used, whichever half it is (1, 3)."""

    async def check() -> None:
        faults = [
            {"kind": "kill", "chunk": 3, "worker": "prefill-0"},
            {"kind": "kill", "chunk": 40, "worker": "prefill-1"},
        ]
        config = make_config(
            directory, model, split=True, transfer=SMALL, faults={"chunks": faults}
        )
        right = reference(model, LONG, 6)
        async with rig(config, "prefill-0", "prefill-1", "decode-0") as router:
            _, second = router.split(request(LONG, 6), prefill="prefill-0")
            await gone(router, "prefill-0")
            quiet = make_config(directory, model, split=True, transfer=SMALL)
            router.start("prefill-0", quiet)
            await router.ready("prefill-0")
            await recover(router, second, "prefill-0")
            assert await router.output(second) == right
            await nothing_is_left(router, "prefill-0", "decode-0")

    run(check())


def test_killed_while_shared_memory_is_copied_another_source_takes_over(
    run: Runner, model: Path, directory: Path
) -> None:
    """Guards the path without checksums: a dead owner's half-written KV is never used (1, 3)."""

    async def check() -> None:
        faults = {"copies": [{"kind": "kill_source", "copy": 5}]}
        config = make_config(directory, model, split=True, faults=faults)
        right = reference(model, LONG, 6)
        async with rig(config, "prefill-0", "prefill-1", "decode-0") as router:
            _, second = router.split(request(LONG, 6), prefill="prefill-0")
            await gone(router, "prefill-0")
            await recover(router, second, "prefill-1")
            assert await router.output(second) == right
            await nothing_is_left(router, "prefill-1", "decode-0")
        (line,) = [x for x in router.logs["decode-0"].splitlines() if " is lost: " in x]
        assert "WARNING request r: its KV (transfer " in line and ") from prefill-0 is" in line
        assert "transfer_failed: " in line and line.endswith("asked for another source")

    run(check())


async def gone(router: Rig, name: str) -> None:
    process = router.processes[name]
    await asyncio.to_thread(process.wait, 60)
    router.kill(name)


def test_two_paths_that_exclude_each_other_are_refused_by_name(
    run: Runner, model: Path, directory: Path
) -> None:
    """Guards a pair that waits for a path one side does not offer (45)."""

    async def check() -> None:
        config = make_config(directory, model, split=True, transfer=HOST)
        (directory / "other").mkdir()
        other = make_config(
            directory / "other",
            model,
            split=True,
            transfer={**HOST, "path": "ipc"},
            runtime_dir=str(directory),
        )
        async with rig(config, "prefill-0") as router:
            router.start("decode-0", other)
            await router.ready("decode-0")
            pair = router.split(request(LONG[:40]))
            await router.until(lambda: any(isinstance(m, TransferLost) for _, m in router.messages))
            (loss,) = [m for _, m in router.messages if isinstance(m, TransferLost)]
            assert loss.error.code == "incompatible_peer"
            assert "transfer.path: host here, ipc there" in loss.error.message
            router.cancel(*pair)

    run(check())
