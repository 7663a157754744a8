"""Attention of single new tokens: the context is cut into partitions that many programs share.

Flash-decoding (Dao et al., 2023) with partitions whose bounds depend on positions alone, so that
a sequence's sums, and with them its rounding, are the same in every batch and in every graph.
"""

import triton
import triton.language as tl

from shared.kernels.gpu.tile import LOG2E, absorb, place_of

SMALL = tl.constexpr(256)
SMALL_COUNT = tl.constexpr(64)
LARGE = tl.constexpr(2048)
"""Keys of the first ``SMALL_COUNT`` partitions, and of those behind: few programs starve at short
contexts, and the sums of long ones still take little memory."""

_MERGED = tl.constexpr(16)


def partition_count(context: int) -> int:
    """Return how many partitions ``context`` keys have."""
    small, count, large = int(SMALL), int(SMALL_COUNT), int(LARGE)
    edge = small * count
    if context <= edge:
        return -(-context // small)
    return count - (edge - context) // large


@triton.jit
def partition_start(number: tl.tensor) -> tl.tensor:
    """Return the first key of a partition."""
    edge = SMALL * SMALL_COUNT
    return tl.where(number < SMALL_COUNT, number * SMALL, edge + (number - SMALL_COUNT) * LARGE)


@triton.jit
def partition_of(key: tl.tensor) -> tl.tensor:
    """Return the partition that a key lies in."""
    edge = SMALL * SMALL_COUNT
    return tl.where(key < edge, key // SMALL, SMALL_COUNT + (key - edge) // LARGE)


@triton.jit(do_not_specialize=["sequences", "room"])
def sum_partitions(
    tensors: tl.tuple,
    sums: tl.tuple,
    strides: tl.tuple,
    sequences: tl.tensor,
    room: tl.tensor,
    form: tl.constexpr,
    KEYS: tl.constexpr,  # noqa: N803
) -> None:
    """Attend one sequence and KV head over every ``num_programs(2)``-th of its partitions.

    ``sums``: values fp32 [decodes, heads, partitions, v_pad] not yet divided by the weights;
    weights and peaks fp32 [decodes, heads, partitions]; there is ``room`` for so many partitions.
    ``strides``: row and head of q. ``sequences``: of the step, a column each in the tables.
    """
    q, pools, tables, context_of, query_start, decodes = tensors
    values, weights, peaks = sums
    q_row, q_head = strides
    decode, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(decodes + decode)
    row = tl.load(query_start + sequence).to(tl.int64)
    context = tl.load(context_of + sequence)
    low = tl.maximum(context - form.window, 0) if form.window > 0 else 0
    group = tl.arange(0, form.group_pad)
    has_head = group < form.heads // form.kv_heads
    head = kv_head * (form.heads // form.kv_heads) + group
    k_column, v_column = tl.arange(0, form.k_pad), tl.arange(0, form.v_pad)
    query = tl.load(
        q + row * q_row + head[:, None] * q_head + k_column[None, :],
        mask=has_head[:, None] & (k_column < form.k_dim)[None, :],
        other=0.0,
    )
    first, last = partition_of(low), partition_of(context - 1)
    for number in range(first + tl.program_id(2), last + 1, tl.num_programs(2)):
        peak = tl.full((form.group_pad,), float("-inf"), tl.float32)
        weight = tl.zeros((form.group_pad,), tl.float32)
        value = tl.zeros((form.group_pad, form.v_pad), tl.float32)
        begin = tl.maximum(partition_start(number), low // KEYS * KEYS)
        end = tl.minimum(partition_start(number + 1), context)
        for tile in range(begin, end, KEYS):
            keys = tile + tl.arange(0, KEYS)
            live = (keys >= low) & (keys < end)
            place = (
                place_of((tables + sequence, sequences), keys, live, form) * form.kv_heads + kv_head
            )
            peak, weight, value = absorb(
                (peak, weight, value),
                query,
                pools,
                place,
                (live, live[None, :]),
                form,
            )
        cell = (decode.to(tl.int64) * form.heads + head) * room + number - first
        tl.store(weights + cell, weight, mask=has_head)
        tl.store(peaks + cell, peak, mask=has_head)
        tl.store(
            values + cell[:, None] * form.v_pad + v_column[None, :], value, mask=has_head[:, None]
        )


@triton.jit(do_not_specialize=["room"])
def merge_partitions(
    out: tl.tensor,
    sinks: tl.tensor,
    sums: tl.tuple,
    index: tl.tuple,
    room: tl.tensor,
    form: tl.constexpr,
) -> None:
    """Add up the partitions of one sequence and head; a sink adds weight and no value.

    ``out`` [rows, heads, v_dim] contiguous.
    """
    values, weights, peaks = sums
    context_of, query_start, decodes = index
    decode, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(decodes + decode)
    row = tl.load(query_start + sequence).to(tl.int64)
    context = tl.load(context_of + sequence)
    low = 0
    if form.window > 0:
        low = tl.maximum(context - form.window, 0)
    count = partition_of(context - 1) - partition_of(low) + 1
    column = tl.arange(0, form.v_pad)
    cell = (decode.to(tl.int64) * form.heads + head) * room
    peak = float("-inf")
    weight = 0.0
    if form.sinks:
        peak = tl.load(sinks + head) * LOG2E
        weight = 1.0
    value = tl.zeros((form.v_pad,), tl.float32)
    for begin in range(0, count, _MERGED):
        number = begin + tl.arange(0, _MERGED)
        there = number < count
        theirs = tl.load(peaks + cell + number, mask=there, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(theirs, 0))
        share = tl.exp2(theirs - higher)
        shrink = tl.exp2(peak - higher)
        part = tl.load(
            values + (cell + number)[:, None] * form.v_pad + column[None, :],
            mask=there[:, None],
            other=0.0,
        )
        own = tl.load(weights + cell + number, mask=there, other=0.0)
        value = value * shrink + tl.sum(part * share[:, None], 0)
        weight = weight * shrink + tl.sum(own * share, 0)
        peak = higher
    tl.store(
        out + (row * form.heads + head) * form.v_dim + column,
        value / weight,
        mask=column < form.v_dim,
    )
