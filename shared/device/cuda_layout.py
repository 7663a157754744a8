"""Where a KV pool's bytes lie in one allocation of device memory.

First a page with the canary, a pattern that only this arena has, and a page for self-tests. Then,
per layer with own storage, K ``[num_blocks + 1, block_size, heads, width]`` and V likewise, each
on a page of its own; fp8 rows are wider than the head, by their scale. The block past
``num_blocks`` is scratch: rows that only fill a graph up write there. Blocks are byte for byte
those of ``shared.kv.arena``.
"""

import hashlib
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from shared.kv.layout import KvLayout

PAGE: Final = 4096
PROBE: Final = PAGE
"""Offset of the page that self-tests write to."""
_START: Final = 2 * PAGE
_MOST_PITCH: Final = (1 << 31) - 1
"""Of rows that CUDA copies at once (``memPitch`` of every device so far)."""
_GRAIN: Final = 2 << 20
"""CUDA cuts smaller allocations out of pieces of this size and exports the whole piece."""


class Region(Struct, frozen=True, gc=False):
    """K or V of one layer: block ``i`` is ``unit`` bytes at ``start + i * unit``."""

    start: int
    unit: int


def regions(layout: KvLayout, num_blocks: int) -> tuple[tuple[Region, Region], ...]:
    """Return K and V of every layer, as offsets; a layer that shares has its owner's."""
    found: list[tuple[Region, Region]] = []
    end = _START
    for layer in range(len(layout.layers)):
        owner = layout.owner(layer)
        if owner != layer:
            found.append(found[owner])
            continue
        k_unit, v_unit = layout.k_block_bytes(layer), layout.v_block_bytes(layer)
        k = Region(end, k_unit)
        v = Region(end + _pages((num_blocks + 1) * k_unit), v_unit)
        end = v.start + _pages((num_blocks + 1) * v_unit)
        found.append((k, v))
    return tuple(found)


def cuda_arena_size(layout: KvLayout, num_blocks: int) -> int:
    """Return the bytes of an arena: pages, ``num_blocks``, scratch block, and up to 2 MiB more."""
    ends = [
        region.start + _pages((num_blocks + 1) * region.unit)
        for pair in regions(layout, num_blocks)
        for region in pair
    ]
    return -(-max(ends) // _GRAIN) * _GRAIN


class Stack(Struct, frozen=True, gc=False):
    """Regions of blocks of ``unit`` bytes at even distances, in two pools alike.

    A run of neighbouring blocks in all of them is one copy of ``rows`` rows.
    """

    unit: int
    rows: int
    source: int
    target: int
    source_pitch: int
    target_pitch: int


def stacks(pairs: Iterable[tuple[Region, Region]]) -> list[Stack]:
    """Group pairs of regions (source's, target's), both in ascending order."""
    found: list[Stack] = []
    for theirs, ours in pairs:
        last = found[-1] if found else None
        if last is not None and last.unit == ours.unit:
            source_pitch = theirs.start - last.source - (last.rows - 1) * last.source_pitch
            target_pitch = ours.start - last.target - (last.rows - 1) * last.target_pitch
            pitches = (source_pitch, target_pitch)
            known = (last.source_pitch, last.target_pitch)
            if pitches == known or (last.rows == 1 and max(pitches) <= _MOST_PITCH):
                rows = last.rows + 1
                found[-1] = Stack(last.unit, rows, last.source, last.target, *pitches)
                continue
        found.append(Stack(ours.unit, 1, theirs.start, ours.start, 0, 0))
    return found


def canary(arena_id: int) -> bytes:
    """Return the page that proves that memory is this arena's."""
    return hashlib.shake_128(arena_id.to_bytes(8, "little")).digest(PAGE)


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
