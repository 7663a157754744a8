"""KV between a GPU's memory and frames: pinned slabs, and copies on a side stream.

Out: a chunk is copied into a slab, the copy's event is waited for, and the caller takes the
checksum of the slab before it compares generations. So the checksum is that of the bytes announced,
as it is where chunks are views of the pool. The next chunk's copy is queued before that event is
waited for: it runs meanwhile.

In: a verified chunk is copied into a slab and from there to its blocks, while the next chunk is
received. ``settle`` waits for the event of the last copy; only after it a job is told to be done.
"""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from shared.device.cuda_pool import CudaPool
from shared.device.cuda_stream import Mark
from shared.device.pinned import Bytes, address_of
from shared.errors import TransferFailed
from shared.kv.copy import merge_runs
from shared.transport.bulk.plan import PlannedChunk

LANDING_SLABS: Final = 4
"""Enough that one is copied to the GPU while the next is filled."""


class SlabLift:
    """A chunk whose copies to a slab are queued up to ``mark``; ``refused`` says what stopped them.

    Not the exception itself, whose traceback would hold the slab.
    """

    def __init__(self, frame: Bytes, mark: Mark, refused: str) -> None:
        self._frame = frame
        self._mark = mark
        self._refused = refused
        self._over = False

    def frames(self) -> list[memoryview]:
        """Wait for the copies and return the chunk as one frame.

        Raises:
            TransferFailed, DeviceLost: as ``SideStream``.
        """
        self.drop()
        if self._refused:
            raise TransferFailed(self._refused)
        return [self._frame.data]

    def drop(self) -> None:
        """Wait for the copies: they write to memory that is somebody else's afterwards.

        Raises:
            DeviceLost: as ``SideStream``.
        """
        if not self._over:
            self._over = True
            self._mark.wait()


class CudaLift:
    """Takes chunks out, at most ``count`` at a time: a slab is free again with its last frame.

    Slabs are pinned with the first chunk: a worker that nobody reads from this way needs none.

    A chunk larger than a slab, as a reader of another ``transfer.chunk_size`` asks for, is staged
    in memory of its own, counted as a slab.
    """

    def __init__(self, pool: CudaPool, count: int, size: int) -> None:
        self._pool = pool
        self._size = size
        self._slabs: list[Bytes] = []
        self._count = count
        self._free = deque(range(count))
        self._marks: list[Mark] = []
        self._stream = pool.side_stream()

    @property
    def room(self) -> bool:
        """Whether a slab is free."""
        return bool(self._free)

    def lift(self, chunk: PlannedChunk, blocks: Sequence[int]) -> SlabLift:
        """Queue the chunk's copies; to be called while there is ``room`` only.

        Raises:
            ResourceMissing: the slabs cannot be pinned.
            DeviceLost: as ``SideStream``.
        """
        if not self._slabs:
            self._slabs = self._pool.slabs(self._count, self._size)
            self._marks = [self._stream.mark() for _ in self._slabs]
        slot = self._free.popleft()
        whole = chunk.size <= self._size
        frame = self._slabs[slot][: chunk.size] if whole else np.empty(chunk.size, np.uint8)
        # libzmq reads the frame when it likes; its garbage collector drops the last reference.
        weakref.finalize(frame, self._free.append, slot).atexit = False
        at, refused = address_of(frame), ""
        try:
            for address, size in _runs(self._pool, chunk, blocks):
                self._stream.copy(at, address, size)
                at += size
        except TransferFailed as error:
            refused = error.message  # told once what was queued before it is done
        mark = self._marks[slot]
        mark.record()
        return SlabLift(frame, mark, refused)

    def close(self) -> None:
        """Give the stream back; slabs go with the frames that libzmq still holds."""
        self._stream.close()
        self._slabs = []


class CudaLand:
    """Puts chunks in, by turns through ``count`` slabs, pinned with the first chunk."""

    def __init__(self, pool: CudaPool, size: int, count: int = LANDING_SLABS) -> None:
        self._pool = pool
        self._stream = pool.side_stream()
        self._size = size
        self._count = count
        self._turns: deque[tuple[Bytes, Mark]] = deque()
        self._pending = False

    def land(
        self, chunk: PlannedChunk, blocks: Sequence[int], frames: Sequence[memoryview]
    ) -> None:
        """Queue the chunk's copies behind those before it.

        Raises:
            ResourceMissing: the slabs cannot be pinned.
            TransferFailed, DeviceLost: as ``SideStream``.
        """
        if not self._turns:
            slabs = self._pool.slabs(self._count, self._size)
            self._turns.extend((slab, self._stream.mark()) for slab in slabs)
        slab, mark = self._turns[0]
        self._turns.rotate(-1)
        mark.wait()  # what this slab held last has reached its blocks
        staged = slab[: chunk.size]
        if chunk.size > slab.size:
            staged = np.empty(chunk.size, np.uint8)
        at = 0
        for part in frames:
            staged[at : at + len(part)] = np.frombuffer(part, dtype=np.uint8)
            at += len(part)
        at = address_of(staged)
        self._pending = True
        try:
            for address, size in _runs(self._pool, chunk, blocks):
                self._stream.copy(address, at, size)
                at += size
        finally:
            mark.record()
            if chunk.size > slab.size:
                mark.wait()  # its memory goes with this call

    def settle(self) -> None:
        """Wait for the last copy's event."""
        if self._pending:
            self._stream.wait()
            self._pending = False

    def close(self) -> None:
        """Give stream and slabs back."""
        self._stream.close()
        self._turns.clear()


def _runs(pool: CudaPool, chunk: PlannedChunk, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield address and bytes of neighbouring blocks, in the chunk's order."""
    for segment in chunk.segments:
        region = pool.regions[segment.layer][segment.part]
        base = pool.address + region.start
        part = blocks[segment.first : segment.end]
        for start, _, count in merge_runs(part, range(len(part))):
            yield base + start * region.unit, count * region.unit
