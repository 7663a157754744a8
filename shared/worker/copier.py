"""The one thread that maps peers' arenas and copies KV out of them."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shared.errors import DiptychError, ErrorPayload, TransferFailed
from shared.kv.arena import KvArena
from shared.kv.copy import copy_blocks, verify_generations
from shared.messages.prefill_decode import ArenaDescriptor
from shared.transport.bulk.faults import FaultyCopies
from shared.worker.effects import Copy
from shared.worker.events import Copied, CopyFailed, Event, SourceKey, SourceLost

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
            self._tell(SourceLost(source, _failed(error)))

    def _unmap(self, source: SourceKey) -> None:
        arena = self._arenas.pop(source, None)
        if arena is not None:
            arena.close()

    def _copy(self, job: Copy) -> None:
        begun = time.monotonic()
        try:
            arena = self._arenas.get(job.source)
            if arena is None:
                raise TransferFailed(f"the KV of {job.source.worker} is not mapped")
            layers = range(job.first_layer, job.end_layer)
            copied = copy_blocks(arena, self._target, layers, job.source_blocks, job.target_blocks)
            harm = None if self._faults is None else self._harm(arena)
            reused = verify_generations(arena, job.source_blocks, job.generations)
            reused += job.source_blocks[:1] if harm == "stale" else ()
        except DiptychError as error:
            self._tell(CopyFailed(job.job, error.payload()))
            return
        except Exception as error:
            log.exception("copy job %d failed", job.job)
            self._tell(CopyFailed(job.job, _failed(error)))
            return
        if reused:
            text = f"{job.source.worker} used {len(reused)} blocks anew while they were copied"
            self._tell(CopyFailed(job.job, TransferFailed(text).payload(), len(reused)))
            return
        self._tell(Copied(job.job, copied, time.monotonic() - begun))

    def _harm(self, arena: KvArena) -> str | None:
        """Do what the deployment file asks for to a copy (``faults:``)."""
        assert self._faults is not None
        harm = self._faults.after_copy(arena.descriptor().pid)
        if harm == "fail":
            raise TransferFailed("a fault was injected into the copy (`faults:`)")
        return harm


def _failed(error: Exception) -> ErrorPayload:
    return TransferFailed(f"the KV copy failed: {type(error).__name__}: {error}").payload()
