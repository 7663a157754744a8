"""A worker's links: what keeps one source from harming the others and the router."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from shared.config import SecuritySection
from shared.errors import ResourceMissing
from shared.ids import Incarnation, WorkerId
from shared.messages.prefill_decode import ArenaDescriptor
from shared.worker import links as links_module
from shared.worker.events import Event, SourceKey, SourceLost
from shared.worker.links import Links

Run = Callable[..., Any]

SOURCE = SourceKey(WorkerId("prefill-0"), Incarnation(4))
ARENA = ArenaDescriptor(pid=1, fd=3, size=4096, num_blocks=4, arena_id=8)


def made(directory: Path, post: Callable[[Event], None]) -> Links:
    """Return the links of a worker, whose router is away."""
    kv, router = (f"ipc://{directory / name}.sock" for name in ("kv", "router"))
    return Links(b"decode-0#1", kv, router, SecuritySection(), post)


def test_a_name_that_resolves_slowly_does_not_silence_the_worker(run: Run, directory: Path) -> None:
    """Guards a fleet lost for one prefill worker that announces a name nobody answers for.

    libzmq looks names up in the I/O thread of their context, for 10 s where the server is silent.
    """

    async def body() -> None:
        links = made(directory, lambda _: None)
        links.connect(SOURCE, "tcp://127.0.0.1:1")
        source = links._sources[SOURCE]._socket.context
        assert links.router._socket.context is links.readers._socket.context is not source
        links.close()

    run(body())


def test_a_source_for_which_no_descriptor_is_left_is_lost(
    run: Run, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a decode worker that ends because it knows too many prefill workers."""

    def full(*_: object) -> None:
        raise ResourceMissing("no descriptor is left")

    async def body() -> None:
        events: asyncio.Queue[Event] = asyncio.Queue()
        links = made(directory, events.put_nowait)
        links._to_sources.set(zmq.MAX_SOCKETS, 1)
        other = SourceKey(WorkerId("prefill-1"), Incarnation(5))
        links.connect(SOURCE, "tcp://127.0.0.1:1")
        links.connect(other, "tcp://127.0.0.1:1")
        lost = await asyncio.wait_for(events.get(), 20)
        assert isinstance(lost, SourceLost) and lost.source == other
        assert "ulimit -n" in lost.error.message
        monkeypatch.setattr(links_module, "watch_pid", full)
        links.watch(SOURCE, ARENA)
        lost = await asyncio.wait_for(events.get(), 20)
        assert isinstance(lost, SourceLost) and lost.source == SOURCE
        links.close()

    run(body())
