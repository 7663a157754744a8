"""Chunks of a pool of another dtype: verified like all others, converted as they land."""

from collections.abc import Sequence

import numpy as np

from shared.kv.arena import KvArena
from shared.kv.copy import land_blocks
from shared.kv.layout import KvLayout
from shared.transport.bulk.plan import PlannedChunk


def land_converted(
    target: KvArena,
    layout: KvLayout,
    chunk: PlannedChunk,
    blocks: Sequence[int],
    frames: Sequence[memoryview],
) -> None:
    """Convert verified frames, ``chunk.size`` bytes of ``layout`` in all, into their blocks."""
    data = np.concatenate([np.frombuffer(frame, dtype=np.uint8) for frame in frames])
    at = 0
    for segment in chunk.segments:
        units = (layout.k_block_bytes(segment.layer), layout.v_block_bytes(segment.layer))
        size = (segment.end - segment.first) * units[segment.part]
        place = (segment.layer, segment.part)
        land_blocks(
            data[at : at + size], layout, target, place, blocks[segment.first : segment.end]
        )
        at += size
