"""Store new keys and values in their pool slots."""

from typing import NamedTuple

import triton
import triton.language as tl


class Row(NamedTuple):
    """Compile-time constants of one layer's rows; ``*_pad`` hold all heads, in powers of two."""

    heads: int
    k_dim: int
    v_dim: int
    k_pad: int
    v_pad: int


@triton.jit(do_not_specialize=["capacity"])
def write_row(tensors: tl.tuple, strides: tl.tuple, capacity: tl.tensor, row: tl.constexpr) -> None:
    """Store one row of k and v. ``strides``: row and head of k, then of v.

    A slot outside the pool is not written: memory past it may be another tensor's.
    """
    k, v, k_pool, v_pool, slots = tensors
    k_row, k_head, v_row, v_head = strides
    index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + index).to(tl.int64)
    inside = (slot >= 0) & (slot < capacity)
    column = tl.arange(0, row.k_pad)
    mask = column < tl.where(inside, row.heads * row.k_dim, 0)
    source = k + index * k_row + column // row.k_dim * k_head + column % row.k_dim
    # By way of fp32: formats that differ do not convert into one another everywhere.
    fresh = tl.load(source, mask=mask).to(tl.float32)
    target = k_pool + slot * (row.heads * row.k_dim) + column
    tl.store(target, fresh.to(k_pool.dtype.element_ty), mask=mask)
    column = tl.arange(0, row.v_pad)
    mask = column < tl.where(inside, row.heads * row.v_dim, 0)
    source = v + index * v_row + column // row.v_dim * v_head + column % row.v_dim
    fresh = tl.load(source, mask=mask).to(tl.float32)
    target = v_pool + slot * (row.heads * row.v_dim) + column
    tl.store(target, fresh.to(v_pool.dtype.element_ty), mask=mask)
