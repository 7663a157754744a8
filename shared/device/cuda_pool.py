"""A pool in a GPU's memory as other processes, and the threads that move KV, see it."""

import logging
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.device.cuda_arena import CudaArena
from shared.device.cuda_layout import PROBE
from shared.device.cuda_memory import CupyMemory
from shared.device.cuda_stream import SideStream
from shared.device.pinned import Bytes
from shared.errors import DeviceLost, ResourceMissing
from shared.kv.arena import KvArena
from shared.kv.layout import KvLayout, LayerKv
from shared.messages.prefill_decode import ArenaDescriptor, CudaDescriptor

log = logging.getLogger(__name__)

BOOK_LAYOUT: Final = KvLayout(dtype="fp16", block_size=1, layers=(LayerKv(1, 1, 1),))
"""Of the host arena that keeps an id and generations: no peer takes it for the KV itself."""


class CudaPool:
    """The arena, and a book in ordinary shared memory with its id and its generations.

    Generations lie there since a reader's CPU must read them after each copy. What is exported is
    worked out once: the handle is good as long as the memory.
    """

    def __init__(self, arena: CudaArena, book: KvArena, memory: CupyMemory, unit: str) -> None:
        self.arena = arena
        self.layout = arena.layout
        self.num_blocks = arena.num_blocks
        self.regions = arena.regions
        self.address = arena.address
        self.memory = memory
        self._book = book
        self._on_lost: Callable[[DeviceLost], None] = lambda error: None
        try:
            handle = memory.export(arena.address)
        except ResourceMissing as error:
            log.warning("%s; KV leaves by host", error.message)
            handle = None
        cuda = CudaDescriptor(
            unit=unit,
            size=arena.size,
            layout=arena.layout.fingerprint(),
            handle=handle,
            sliced=memory.sliced,
        )
        self._descriptor = msgspec.structs.replace(
            book.descriptor(), cuda=cuda, dtype=arena.layout.dtype
        )

    @property
    def generations(self) -> NDArray[np.uint64]:
        """uint64 ``[num_blocks]`` in shared memory."""
        return self._book.generations

    @property
    def probe_address(self) -> int:
        """A page for self-tests, of one thread."""
        return self.arena.address + PROBE

    @property
    def cuda(self) -> CudaDescriptor:
        """The GPU's part of the descriptor."""
        assert self._descriptor.cuda is not None
        return self._descriptor.cuda

    def descriptor(self) -> ArenaDescriptor:
        """Return what a peer needs to read this pool."""
        return self._descriptor

    def when_lost(self, tell: Callable[[DeviceLost], None]) -> None:
        """Have ``tell`` called, in whatever thread, when copies fail so that nothing is sure."""
        self._on_lost = tell

    def side_stream(self) -> SideStream:
        """Return a new stream for one thread's copies; to be closed by it."""
        return self.memory.side_stream(lambda error: self._on_lost(error))

    def slabs(self, count: int, size: int) -> list[Bytes]:
        """Return pinned memory for ``count`` pieces of ``size`` bytes."""
        return self.memory.pinned(count, size)

    def close(self) -> None:
        """Take every block back before the memory goes, and close the book.

        The memory itself is freed with the process: readers may have it mapped, and to free it
        under them is undefined. A reader that copies meanwhile finds other generations.
        """
        self.generations[:] += np.uint64(1)
        self._book.close()
