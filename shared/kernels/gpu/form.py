"""What a kernel is compiled for: everything of a layer that does not change from step to step."""

from typing import NamedTuple

import torch

from shared.kernels.kv_rows import head_dim, is_scaled
from shared.kv.layout import SCALE_BYTES

_LEAST = 16
"""Edge of the smallest matrix that tensor cores multiply."""


class Form(NamedTuple):
    """Compile-time constants of one layer's attention; tuples of plain values only.

    ``*_pad`` are powers of two of at least 16. ``window`` 0 and ``softcap`` 0.0 mean none.
    ``exact``: products in fp32; else in the format of q with fp32 sums. ``scaled``: the pools'
    rows are e4m3 elements and their scale; ``*_width`` elements lie between two rows.
    """

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    k_width: int
    v_width: int
    k_pad: int
    v_pad: int
    group_pad: int
    block_size: int
    window: int
    softcap: float
    sinks: bool
    exact: bool
    scaled: bool
    scale: float


def form_of(
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    window: int,
    softcap: float,
    sinks: bool,
    scale: float,
) -> Form:
    """Return the form of q [rows, heads, k_dim] over pools [blocks, block_size, kv_heads, width].

    Raises:
        RuntimeError: shapes do not fit one another, or a pool is not contiguous.
    """
    k_pool, v_pool = pools
    k_dim, v_dim = head_dim(k_pool), head_dim(v_pool)
    if k_pool.shape[:3] != v_pool.shape[:3] or q.shape[2] != k_dim:
        raise RuntimeError(
            f"q {tuple(q.shape)} does not fit pools {tuple(k_pool.shape)} and {tuple(v_pool.shape)}"
        )
    if q.shape[1] % k_pool.shape[2]:
        raise RuntimeError(f"{q.shape[1]} heads cannot share {k_pool.shape[2]} KV heads")
    if not (k_pool.is_contiguous() and v_pool.is_contiguous()) or q.stride(2) != 1:
        raise RuntimeError("pools must be contiguous, and the last axis of q adjacent")
    scaled = is_scaled(k_pool)
    if scaled and (k_pool.dtype == torch.int8 or k_dim % SCALE_BYTES or v_dim % SCALE_BYTES):
        raise RuntimeError(f"scaled pools are fp8 with heads of a multiple of {SCALE_BYTES}")
    same = q.dtype if scaled else k_pool.dtype
    return Form(
        heads=q.shape[1],
        kv_heads=k_pool.shape[2],
        k_dim=k_dim,
        v_dim=v_dim,
        k_width=k_pool.shape[3],
        v_width=v_pool.shape[3],
        k_pad=_tile(k_dim),
        v_pad=_tile(v_dim),
        group_pad=_tile(q.shape[1] // k_pool.shape[2]),
        block_size=k_pool.shape[1],
        window=window,
        softcap=softcap,
        sinks=sinks,
        exact=k_pool.dtype != v_pool.dtype or q.dtype != same or q.dtype == torch.float32,
        scaled=scaled,
        scale=scale,
    )


def padded(width: int) -> int:
    """Return the next power of two, the sizes that a kernel's ranges have."""
    return 1 << (width - 1).bit_length()


def _tile(width: int) -> int:
    return max(_LEAST, padded(width))
