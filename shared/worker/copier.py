"""The one thread that maps peers' arenas and copies KV out of them."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shared.errors import DiptychError, TransferFailed
from shared.kv.arena import KvArena
from shared.kv.copy import copy_blocks, verify_generations
from shared.messages.prefill_decode import ArenaDescriptor
from shared.transport.bulk.faults import FaultyCopies
from shared.worker.copy_outcome import copy_failed, harm, outcome_of
from shared.worker.effects import Copy
from shared.worker.events import Event, SourceKey, SourceLost

log = logging.getLogger(__name__)


class Copier:
    """Does jobs in the order given and posts their outcome onto the loop.

    A source's mapping lives from ``map_arena`` to ``unmap``; it stays readable though its
    owner has died, so a copy never faults.
    """

    def __init__(
        self,
        target: KvArena,
        post: Callable[[Event], None],
        *,
        mapped: Callable[[SourceKey], None] | None = None,
        faults: FaultyCopies | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._target = target
        self._post = post
        self._on_mapped = mapped
        self._faults = faults
        self._arenas: dict[SourceKey, KvArena] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copy")

    def map_arena(self, source: SourceKey, arena: ArenaDescriptor) -> None:
        """Map a peer's pool: ``mapped`` is called, or failure is a ``SourceLost``."""
        self._thread.submit(self._map, source, arena)

    def unmap(self, source: SourceKey) -> None:
        """Drop the mapping after the jobs already given."""
        self._thread.submit(self._unmap, source)

    def copy(self, job: Copy) -> None:
        """Copy and verify; answered by ``Copied`` or ``CopyFailed``."""
        self._thread.submit(self._copy, job)

    def close(self) -> None:
        """Finish the running job, drop the others and every mapping, end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        for source in list(self._arenas):
            self._unmap(source)

    def _tell(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._post, event)

    def _map(self, source: SourceKey, descriptor: ArenaDescriptor) -> None:
        try:
            layout = self._target.layout.with_dtype(descriptor.dtype)
            self._arenas[source] = KvArena.open(descriptor, layout)
            if self._on_mapped is not None:
                self._loop.call_soon_threadsafe(self._on_mapped, source)
        except DiptychError as error:
            self._tell(SourceLost(source, error.payload()))
        except Exception as error:
            log.exception("mapping the arena of %s failed", source.worker)
            self._tell(SourceLost(source, copy_failed(error)))

    def _unmap(self, source: SourceKey) -> None:
        arena = self._arenas.pop(source, None)
        if arena is not None:
            arena.close()

    def _copy(self, job: Copy) -> None:
        self._tell(outcome_of(job, self._moved))

    def _moved(self, job: Copy) -> tuple[int, int]:
        """Return the bytes that came, and how many blocks of them are void."""
        arena = self._arenas.get(job.source)
        if arena is None:
            raise TransferFailed(f"the KV of {job.source.worker} is not mapped")
        layers = range(job.first_layer, job.end_layer)
        copied = copy_blocks(arena, self._target, layers, job.source_blocks, job.target_blocks)
        stale = harm(self._faults, arena.descriptor().pid)
        reused = verify_generations(arena, job.source_blocks, job.generations)
        return copied, len(reused) + stale
