"""Pools whose rows end with their scale: the tensors that kernels take, and storing new rows."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shared.kernels.fp8 import LARGEST, LEAST_SCALE
from shared.kernels.kv_rows import is_scaled

_LARGEST = tl.constexpr(LARGEST)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)


class Head(NamedTuple):
    """Compile-time constants of one layer's K or V; ``*_pad`` are powers of two."""

    heads: int
    heads_pad: int
    dim: int
    pad: int


def with_scales(pools: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return K, V and both as fp32, where the scales are; themselves again where there are none."""
    k_pool, v_pool = pools
    if not is_scaled(k_pool):
        return (k_pool, v_pool, k_pool, v_pool)
    return (k_pool, v_pool, k_pool.view(torch.float32), v_pool.view(torch.float32))


@triton.jit
def scale_for(most: tl.tensor) -> tl.tensor:
    """Return the scale of a row whose largest magnitude is ``most``, fp32.

    That of infinities is NaN, and so is all of their row; a NaN stays one in any scale.
    """
    scale = tl.maximum(tl.math.div_rn(most, _LARGEST), _LEAST_SCALE)
    return tl.where(most < float("inf"), scale, float("nan"))


@triton.jit
def _store(
    source: tl.tensor,
    head_stride: tl.tensor,
    target: tl.tuple,
    slot: tl.tensor,
    inside: tl.tensor,
    head: tl.constexpr,
) -> None:
    pool, scales = target
    number, column = tl.arange(0, head.heads_pad), tl.arange(0, head.pad)
    there = number < tl.where(inside, head.heads, 0)
    mask = there[:, None] & (column < head.dim)[None, :]
    fresh = tl.load(source + number[:, None] * head_stride + column[None, :], mask=mask, other=0.0)
    fresh = fresh.to(tl.float32)
    scale = scale_for(tl.max(tl.abs(fresh), 1))
    row = slot * head.heads + number
    whole = tl.math.div_rn(fresh, tl.broadcast_to(scale[:, None], fresh.shape))
    width: tl.constexpr = head.dim + 4
    tl.store(
        pool + row[:, None] * width + column[None, :], whole.to(pool.dtype.element_ty), mask=mask
    )
    tl.store(scales + row * (width // 4) + head.dim // 4, scale, mask=there)


@triton.jit(do_not_specialize=["capacity"])
def write_scaled_row(
    tensors: tl.tuple,
    pools: tl.tuple,
    strides: tl.tuple,
    capacity: tl.tensor,
    k_head: tl.constexpr,
    v_head: tl.constexpr,
) -> None:
    """As ``write_row``, into the ``pools`` of ``with_scales``."""
    k, v, slots = tensors
    k_pool, v_pool, k_scales, v_scales = pools
    k_stride, k_head_stride, v_stride, v_head_stride = strides
    index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + index).to(tl.int64)
    inside = (slot >= 0) & (slot < capacity)
    _store(k + index * k_stride, k_head_stride, (k_pool, k_scales), slot, inside, k_head)
    _store(v + index * v_stride, v_head_stride, (v_pool, v_scales), slot, inside, v_head)
