"""Attention of prompt chunks: a tile of one sequence's rows walks over the keys it may see.

FlashAttention-2 (Dao, 2023) over block tables. Tiles begin at multiples of their height within
the chunk and key tiles at multiples of theirs, so a row's sums depend on its own chunk alone.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from shared.kernels.gpu.tile import LOG2E, absorb, place_of


class TileSize(NamedTuple):
    """Rows and keys of one program's tile, and how many programs share a tile of the plan."""

    rows: int
    keys: int
    parts: int


@triton.jit(do_not_specialize=["sequences"])
def attend_chunk(
    tensors: tl.tuple,
    index: tl.tuple,
    strides: tl.tuple,
    sequences: tl.tensor,
    form: tl.constexpr,
    size: tl.constexpr,
) -> None:
    """Attend ``size.rows`` rows of one chunk and one query head; ``size.parts`` share a tile.

    ``index``: tables, context, query_start and tiles int32 [tiles, 2] with each tile's sequence
    and its first row counted from the chunk's. The others are as in ``sum_partitions``.
    """
    q, pools, sinks, out = tensors
    tables, context_of, query_start, tiles = index
    q_row, q_head = strides
    head, tile_of = tl.program_id(1), tiles + 2 * (tl.program_id(0) // size.parts)
    kv_head = head // (form.heads // form.kv_heads)
    sequence = tl.load(tile_of)
    offset = tl.load(tile_of + 1) + tl.program_id(0) % size.parts * size.rows
    first, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    context = tl.load(context_of + sequence)
    row = (first + offset + tl.arange(0, size.rows)).to(tl.int64)
    has_row = row < end
    newest = context - (end - first) + offset
    position = newest + tl.arange(0, size.rows)
    low = 0
    if form.window > 0:
        low = tl.maximum(newest - form.window + 1, 0)
    k_column, v_column = tl.arange(0, form.k_pad), tl.arange(0, form.v_pad)
    query = tl.load(
        q + row[:, None] * q_row + head * q_head + k_column[None, :],
        mask=has_row[:, None] & (k_column < form.k_dim)[None, :],
        other=0.0,
    )
    weight = tl.zeros((size.rows,), tl.float32)
    if form.sinks:
        peak = weight + tl.load(sinks + head) * LOG2E
        weight += 1.0
    else:
        peak = weight - float("inf")
    value = tl.zeros((size.rows, form.v_pad), tl.float32)
    # The last tile's later parts may have no row at all.
    end_key = tl.where(first + offset < end, tl.minimum(context, newest + size.rows), 0)
    for tile in range(low // size.keys * size.keys, end_key, size.keys):
        keys = tile + tl.arange(0, size.keys)
        live = (keys >= low) & (keys < context)
        place = place_of((tables + sequence, sequences), keys, live, form) * form.kv_heads + kv_head
        seen = live[None, :] & (keys[None, :] <= position[:, None])
        if form.window > 0:
            seen = seen & (keys[None, :] > position[:, None] - form.window)
        peak, weight, value = absorb((peak, weight, value), query, pools, place, (live, seen), form)
    tl.store(
        out + (row[:, None] * form.heads + head) * form.v_dim + v_column[None, :],
        value / tl.where(has_row, weight, 1.0)[:, None],
        mask=has_row[:, None] & (v_column < form.v_dim)[None, :],
    )
