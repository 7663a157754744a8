"""The ``nixl`` row of ``diptych bench transfer``: the reader of a decode worker, as it is."""

import asyncio
import queue
import threading
from typing import Final

from shared.errors import DiptychError, TransferFailed
from shared.ids import BlockId, Incarnation, WorkerId
from shared.kv.arena import KvArena
from shared.transport.bulk.nixl import NixlEnd, load_library
from shared.worker.effects import Copy
from shared.worker.events import Copied, CopyFailed, Event, SourceKey, SourceLost
from shared.worker.nixl_reader import STAGING_BYTES, NixlReader
from tools.bench.transfer_movers import DEADLINE, sleep_until
from tools.bench.transfer_plan import Span
from tools.bench.transfer_source import SourceReady

_SOURCE: Final = SourceKey(WorkerId("bench"), Incarnation(1))


def nixl_works() -> bool:
    """Return whether the library is installed and loads."""
    try:
        load_library()
    except DiptychError:
        return False
    return True


class NixlMover:
    """Reads by address, with a loop of its own for what the reader says.

    Raises:
        ResourceMissing: the library does not start.
        TransferFailed: the sending process's pool cannot be read.
    """

    def __init__(self, ready: SourceReady, target: KvArena) -> None:
        assert ready.nixl is not None
        self._events: queue.SimpleQueue[Event | SourceKey] = queue.SimpleQueue()
        self._job = 0
        self._end = NixlEnd("bench-reader", target, STAGING_BYTES)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nixl-events")
        self._thread.start()
        self._reader = asyncio.run_coroutine_threadsafe(self._made(target), self._loop).result(
            DEADLINE
        )
        self._reader.meet(_SOURCE, ready.arena, ready.nixl)
        if not isinstance(self._next(), SourceKey):
            self.close()
            raise TransferFailed("the sending process's pool cannot be read by NIXL")

    def move(self, spans: list[Span], begun: float) -> int:
        """Ask for each span when it is readable, and wait for all."""
        for span in spans:
            sleep_until(begun + span.at)
            blocks = tuple(range(span.first_block, span.end_block))
            self._job += 1
            self._reader.copy(
                Copy(
                    job=self._job,
                    source=_SOURCE,
                    first_layer=span.first_layer,
                    end_layer=span.end_layer,
                    source_blocks=blocks,
                    generations=(0,) * len(blocks),
                    target_blocks=tuple(map(BlockId, blocks)),
                )
            )
        wire = 0
        for _ in spans:
            event = self._next()
            if not isinstance(event, Copied):
                why = event.error.message if isinstance(event, CopyFailed | SourceLost) else event
                raise TransferFailed(f"a read failed: {why}")
            wire += event.wire_bytes
        return wire

    def close(self) -> None:
        """End both threads and let go of the pool."""
        self._reader.close()
        self._end.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _made(self, target: KvArena) -> NixlReader:
        post = self._events.put
        return NixlReader(self._end, target, post, seconds=DEADLINE, met=post)

    def _next(self) -> Event | SourceKey:
        try:
            return self._events.get(timeout=DEADLINE)
        except queue.Empty:
            text = f"the sending process was not read for {DEADLINE:g} s"
            raise TransferFailed(text) from None
