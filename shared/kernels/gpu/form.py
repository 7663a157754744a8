"""What a kernel is compiled for: everything of a layer that does not change from step to step."""

from typing import NamedTuple

import torch

_LEAST = 16
"""Edge of the smallest matrix that tensor cores multiply."""


class Form(NamedTuple):
    """Compile-time constants of one layer's attention; tuples of plain values only.

    ``*_pad`` are powers of two of at least 16. ``window`` 0 and ``softcap`` 0.0 mean none.
    ``exact``: products in fp32; else in the pools' own format with fp32 sums.
    """

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    k_pad: int
    v_pad: int
    group_pad: int
    block_size: int
    window: int
    softcap: float
    sinks: bool
    exact: bool
    scale: float


def form_of(
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    window: int,
    softcap: float,
    sinks: bool,
    scale: float,
) -> Form:
    """Return the form of q [rows, heads, k_dim] over pools [blocks, block_size, kv_heads, dim].

    Raises:
        RuntimeError: shapes do not fit one another, or a pool is not contiguous.
    """
    k_pool, v_pool = pools
    if k_pool.shape[:3] != v_pool.shape[:3] or q.shape[2] != k_pool.shape[3]:
        raise RuntimeError(
            f"q {tuple(q.shape)} does not fit pools {tuple(k_pool.shape)} and {tuple(v_pool.shape)}"
        )
    if q.shape[1] % k_pool.shape[2]:
        raise RuntimeError(f"{q.shape[1]} heads cannot share {k_pool.shape[2]} KV heads")
    if not (k_pool.is_contiguous() and v_pool.is_contiguous()) or q.stride(2) != 1:
        raise RuntimeError("pools must be contiguous, and the last axis of q adjacent")
    return Form(
        heads=q.shape[1],
        kv_heads=k_pool.shape[2],
        k_dim=k_pool.shape[3],
        v_dim=v_pool.shape[3],
        k_pad=_padded(k_pool.shape[3]),
        v_pad=_padded(v_pool.shape[3]),
        group_pad=_padded(q.shape[1] // k_pool.shape[2]),
        block_size=k_pool.shape[1],
        window=window,
        softcap=softcap,
        sinks=sinks,
        exact=not (q.dtype == k_pool.dtype == v_pool.dtype != torch.float32),
        scale=scale,
    )


def _padded(width: int) -> int:
    return max(_LEAST, 1 << (width - 1).bit_length())
