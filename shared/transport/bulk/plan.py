"""How the bytes of a job are cut into chunks: the same on both sides, from the same numbers."""

from msgspec import Struct

from shared.kv.layout import KvLayout
from shared.messages.bulk import Fetch

MAX_CHUNK = 8 << 20


class Segment(Struct, frozen=True, gc=False):
    """K (``part`` 0) or V (1) of positions [``first``, ``end``) of the job's block list."""

    layer: int
    part: int
    first: int
    end: int


class PlannedChunk(Struct, frozen=True):
    """The segments of one chunk, in order, and their bytes together."""

    segments: tuple[Segment, ...]
    size: int


def plan_fetch(layout: KvLayout, fetch: Fetch) -> tuple[PlannedChunk, ...]:
    """Return the chunks of a fetch, encoded or not."""
    plan = plan_chunks if fetch.codec == "none" else plan_encoded
    layers = range(fetch.first_layer, fetch.end_layer)
    return plan(layout, layers, len(fetch.blocks), fetch.chunk_bytes)


def plan_encoded(
    layout: KvLayout, layers: range, blocks: int, chunk_bytes: int
) -> tuple[PlannedChunk, ...]:
    """Cut the same into chunks of K and V of one layer each, as codecs take them.

    ``size`` counts raw bytes: at most ``chunk_bytes``, or one block of one layer.
    """
    chunks: list[PlannedChunk] = []
    for layer in layers:
        if layout.owner(layer) != layer:
            continue
        unit = layout.layer_block_bytes(layer)
        step = max(1, chunk_bytes // unit)
        for first in range(0, blocks, step):
            end = min(blocks, first + step)
            parts = (Segment(layer, 0, first, end), Segment(layer, 1, first, end))
            chunks.append(PlannedChunk(parts, (end - first) * unit))
    return tuple(chunks)


def plan_chunks(
    layout: KvLayout, layers: range, blocks: int, chunk_bytes: int
) -> tuple[PlannedChunk, ...]:
    """Cut K and V of ``layers`` (those with own storage) of ``blocks`` blocks into chunks.

    A chunk has at most ``chunk_bytes`` bytes, or one block's K or V of one layer where that
    is larger; small layers share a chunk.
    """
    chunks: list[PlannedChunk] = []
    segments: list[Segment] = []
    size = 0
    for layer in layers:
        if layout.owner(layer) != layer:
            continue
        units = (layout.k_block_bytes(layer), layout.v_block_bytes(layer))
        for part, unit in enumerate(units):
            first = 0
            while unit and first < blocks:
                fit = (chunk_bytes - size) // unit
                if fit < 1 and segments:
                    chunks.append(PlannedChunk(tuple(segments), size))
                    segments, size = [], 0
                    continue
                end = min(blocks, first + max(fit, 1))
                segments.append(Segment(layer, part, first, end))
                size += (end - first) * unit
                first = end
    if segments:
        chunks.append(PlannedChunk(tuple(segments), size))
    return tuple(chunks)
