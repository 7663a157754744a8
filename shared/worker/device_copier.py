"""The one thread that maps peers' GPU memory and copies KV out of it.

What makes a byte trusted, in this order, across the two processes:

1. source: the kernels that write a layer have passed their event (``Announcer``), then it is
   announced with the generations of its blocks
2. here: copies are queued on a side stream, and their event is waited for
3. here: the source's process has not begun to end, and the generations, read by the CPU from its
   memory file, are those announced
4. here: ``Copied`` is posted, and only then a step may read the blocks

The wait in 2 is the host's. So the step that reads the blocks is launched after the copy has
ended, and no event is shared between streams or processes. A block of this worker's pool that is
copied to is nobody else's: it was given out after the last step that used it had ended.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shared.device.cuda_layout import PAGE
from shared.device.cuda_mapping import PROBE_SLABS, CudaMapping
from shared.device.cuda_pool import CudaPool
from shared.errors import DeviceLost, DiptychError, ErrorPayload, NoPeerAccess, TransferFailed
from shared.messages.fleet import PathReason
from shared.messages.prefill_decode import ArenaDescriptor
from shared.transport.bulk.faults import FaultyCopies
from shared.worker.copy_outcome import copy_failed, harm, outcome_of
from shared.worker.effects import Copy
from shared.worker.events import Event, SourceKey

log = logging.getLogger(__name__)

Refused = Callable[[SourceKey, PathReason, ErrorPayload], None]


class DeviceCopier:
    """As ``Copier``, for pools in GPUs' memory.

    A job whose copies cannot be waited for is not answered: its blocks must not be given out
    again. The pool's ``when_lost`` has been told, and the worker ends.

    Raises:
        ResourceMissing: two pages cannot be pinned.
    """

    def __init__(
        self,
        target: CudaPool,
        post: Callable[[Event], None],
        *,
        mapped: Callable[[SourceKey], None],
        refused: Refused,
        faults: FaultyCopies | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._target = target
        self._post = post
        self._on_mapped = mapped
        self._on_refused = refused
        self._faults = faults
        self._mappings: dict[SourceKey, CudaMapping] = {}
        self._probe = target.slabs(PROBE_SLABS, PAGE)
        self._stream = target.side_stream()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copy")

    def map_arena(self, source: SourceKey, arena: ArenaDescriptor) -> None:
        """Map and test a peer's pool: ``mapped`` is called, or ``refused`` with the reason."""
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
        for source in list(self._mappings):
            self._unmap(source)
        self._stream.close()
        self._probe = []

    def _tell(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._post, event)

    def _map(self, source: SourceKey, descriptor: ArenaDescriptor) -> None:
        self._unmap(source)
        try:
            mapping = CudaMapping.open(self._target, descriptor, self._stream, self._probe)
        except DeviceLost as error:
            log.error("%s", error.message)
        except DiptychError as error:
            reason: PathReason = (
                "no_peer_access" if isinstance(error, NoPeerAccess) else "cannot_map"
            )
            self._refuse(source, reason, error.payload())
        except Exception as error:
            log.exception("mapping the GPU memory of %s failed", source.worker)
            self._refuse(source, "cannot_map", copy_failed(error))
        else:
            self._mappings[source] = mapping
            self._loop.call_soon_threadsafe(self._on_mapped, source)

    def _refuse(self, source: SourceKey, reason: PathReason, error: ErrorPayload) -> None:
        self._loop.call_soon_threadsafe(self._on_refused, source, reason, error)

    def _unmap(self, source: SourceKey) -> None:
        mapping = self._mappings.pop(source, None)
        if mapping is None:
            return
        try:
            mapping.close()
        except RuntimeError:
            log.exception("unmapping the GPU memory of %s failed", source.worker)

    def _copy(self, job: Copy) -> None:
        try:
            outcome = outcome_of(job, self._moved)
        except DeviceLost as error:
            log.error("%s", error.message)
        else:
            self._tell(outcome)

    def _moved(self, job: Copy) -> tuple[int, int]:
        """Return the bytes that came, and how many blocks of them are void."""
        mapping = self._mappings.get(job.source)
        if mapping is None:
            raise TransferFailed(f"the KV of {job.source.worker} is not mapped")
        layers = range(job.first_layer, job.end_layer)
        try:
            copied = mapping.copy(self._stream, layers, job.source_blocks, job.target_blocks)
        finally:
            # On an error, too: the blocks are given out again as soon as it is answered.
            self._stream.wait()
        stale = harm(self._faults, mapping.owner.pid)
        reused = len(mapping.changed(job.source_blocks, job.generations))
        return copied, reused + stale
