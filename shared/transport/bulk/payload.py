"""From the pool to payload frames and back: the stages that a device turns into D2H and H2D."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from shared.transport.bulk.plan import PlannedChunk

ZERO_COPY = 64 << 10
"""pyzmq copies smaller frames anyway (its ``COPY_THRESHOLD``)."""

Bytes = NDArray[np.uint8]


class Pool(Protocol):
    """What a transfer needs of a KV pool; ``KvArena`` is one."""

    def raw(self, layer: int) -> tuple[Bytes, Bytes]:
        """Return K and V of a layer as uint8 ``[num_blocks, bytes per block]``, no copy."""
        ...


def lift(
    pool: Pool, chunk: PlannedChunk, blocks: Sequence[int], *, zero_copy: int = ZERO_COPY
) -> list[memoryview]:
    """Return a chunk's bytes as frames: views of the pool, or one copy.

    Views if each run of neighbouring blocks has ``zero_copy`` bytes at least.
    """
    runs = list(_runs(pool, chunk, blocks))
    if min(run.size for run in runs) >= zero_copy:
        return [run.data for run in runs]
    return [np.concatenate(runs).data]


def checksum(frames: Sequence[memoryview]) -> int:
    """Return XXH3-64 over all frames."""
    digest = xxhash.xxh3_64()
    for frame in frames:
        digest.update(frame)
    return digest.intdigest()


def land(
    pool: Pool, chunk: PlannedChunk, blocks: Sequence[int], frames: Sequence[memoryview]
) -> None:
    """Copy verified frames of ``chunk.size`` bytes in all to their blocks."""
    waiting = iter(frames)
    source = np.empty(0, dtype=np.uint8)
    for target in _runs(pool, chunk, blocks):
        done = 0
        while done < target.size:
            if not source.size:
                source = np.frombuffer(next(waiting), dtype=np.uint8)
                continue
            count = min(source.size, target.size - done)
            target[done : done + count] = source[:count]
            source, done = source[count:], done + count


def chunk_blocks(chunk: PlannedChunk, count: int) -> slice:
    """Return which part of a job's ``count`` blocks a chunk touches, as one range."""
    segments = chunk.segments
    if len(segments) > 2:
        return slice(0, count)
    return slice(min(s.first for s in segments), max(s.end for s in segments))


def _runs(pool: Pool, chunk: PlannedChunk, blocks: Sequence[int]) -> Iterator[Bytes]:
    """Yield the flat bytes of neighbouring blocks, in the chunk's order."""
    for segment in chunk.segments:
        raw = pool.raw(segment.layer)[segment.part]
        start = end = -1
        for block in blocks[segment.first : segment.end]:
            if block == end:
                end += 1
                continue
            if end > start:
                yield raw[start:end].reshape(-1)
            start, end = block, block + 1
        yield raw[start:end].reshape(-1)
