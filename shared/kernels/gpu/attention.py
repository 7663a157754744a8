"""Launches of our Triton kernels. Needs triton; on a GPU, or under its interpreter on the CPU."""

from typing import Any, Final

import torch

from shared.kernels import fp8
from shared.kernels.gpu.chunk import TileSize, attend_chunk
from shared.kernels.gpu.decode import merge_partitions, partition_count, sum_partitions
from shared.kernels.gpu.form import Form, form_of, padded
from shared.kernels.gpu.plan import TILE_ROWS, Plan
from shared.kernels.gpu.quantise import Rows, quantise_row
from shared.kernels.gpu.scaled import Head, with_scales, write_scaled_row
from shared.kernels.gpu.write import Row, write_row
from shared.kernels.kv_rows import head_dim, is_scaled

_PROGRAMS: Final = 1024
"""Programs that keep a large GPU busy; more of them per sequence only add sums to merge."""

_WIDE: Final = 128
_WIDEST: Final = 256
"""Head widths above which key tiles shrink, and fewer loads are in flight, so that all fits the
99 KiB of shared memory that every GPU since Ampere has."""


_SPAN: Final = 4096
"""Elements of a row that a program quantises at a time."""

_OPTIONS: Final[dict[str, Any]] = {"num_warps": 4, "enable_fp_fusion": True}
"""Said, not left to triton: its default for fusing changes from one version to the next, and
with it the last bits of every sum."""


def paged_attention(
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    plan: Plan,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend q [rows, heads, k_dim]; see ``shared.kernels.ops.paged_attention``.

    A sequence's result does not depend on the others of its batch.

    Raises:
        RuntimeError: shapes do not fit.
    """
    form = form_of(q, pools, window or 0, softcap or 0.0, sinks is not None, scaling)
    out = q.new_empty((q.shape[0], form.heads, form.v_dim))
    # A kernel without sinks never reads the pointer, yet it needs one.
    weights = out if sinks is None else sinks
    if plan.decodes.shape[0]:
        _decode(q, pools, plan, (out, weights), form)
    if plan.tiles.shape[0]:
        size, stages = _tile(form)
        attend_chunk[(plan.tiles.shape[0] * size.parts, form.heads)](
            (q, with_scales(pools), weights, out),
            (plan.tables, plan.context, plan.query_start, plan.tiles),
            (q.stride(0), q.stride(1)),
            plan.tables.shape[1],
            form,
            size,
            num_stages=stages,
            **_OPTIONS,
        )
    return out


def _tile(form: Form) -> tuple[TileSize, int]:
    """Return the tile of a chunk, and how many loads are in flight.

    fp32 products have no matrix units: larger tiles would not fit the registers.
    """
    width = max(form.k_pad, form.v_pad)
    rows = 16 if form.exact else TILE_ROWS if width <= _WIDEST else TILE_ROWS // 2
    keys = (32 if width > _WIDE else 64) // (2 if form.exact else 1)
    return TileSize(rows, keys, TILE_ROWS // rows), _stages(form)


def _stages(form: Form) -> int:
    return 1 if form.exact or max(form.k_pad, form.v_pad) > _WIDEST else 2


def _decode(
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    plan: Plan,
    target: tuple[torch.Tensor, torch.Tensor],
    form: Form,
) -> None:
    out, sinks = target
    decodes = plan.decodes.shape[0]
    room = partition_count(plan.longest)
    cells = (decodes, form.heads, room)
    values = q.new_empty((*cells, form.v_pad), dtype=torch.float32)
    weights = q.new_empty(cells, dtype=torch.float32)
    peaks = q.new_empty(cells, dtype=torch.float32)
    share = min(room, max(1, -(-_PROGRAMS // (decodes * form.kv_heads))))
    sum_partitions[(decodes, form.kv_heads, share)](
        (q, with_scales(pools), plan.tables, plan.context, plan.query_start, plan.decodes),
        (values, weights, peaks),
        (q.stride(0), q.stride(1)),
        plan.tables.shape[1],
        room,
        form,
        KEYS=32 if form.exact or max(form.k_pad, form.v_pad) > _WIDEST else 64,
        num_stages=_stages(form),
        **_OPTIONS,
    )
    merge_partitions[(decodes, form.heads)](
        out,
        sinks,
        (values, weights, peaks),
        (plan.context, plan.query_start, plan.decodes),
        room,
        form,
        **_OPTIONS,
    )


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store k, v [rows, kv_heads, dim] in ``slots`` [rows] of one layer's contiguous pools.

    A slot outside the pool is left out.

    Raises:
        RuntimeError: shapes do not fit.
    """
    heads, k_dim, v_dim = k.shape[1], k.shape[2], v.shape[2]
    for fresh, pool in ((k, k_pool), (v, v_pool)):
        if (pool.shape[2], head_dim(pool)) != (heads, fresh.shape[2]):
            raise RuntimeError(f"rows {tuple(fresh.shape)} do not fit a pool {tuple(pool.shape)}")
        if fresh.stride(2) != 1:
            raise RuntimeError("the last axis of k and v must be adjacent")
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    if is_scaled(k_pool):
        write_scaled_row[(k.shape[0],)](
            (k, v, slots),
            with_scales((k_pool, v_pool)),
            strides,
            k_pool.shape[0] * k_pool.shape[1],
            Head(heads, padded(heads), k_dim, padded(k_dim)),
            Head(heads, padded(heads), v_dim, padded(v_dim)),
            **_OPTIONS,
        )
        return
    widths = (padded(heads * k_dim), padded(heads * v_dim))
    write_row[(k.shape[0],)](
        (k, v, k_pool, v_pool, slots),
        strides,
        k_pool.shape[0] * k_pool.shape[1],
        Row(heads, k_dim, v_dim, *widths),
        **_OPTIONS,
    )


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 [rows, n] and fp32 scales [rows, 1] of x [rows, n].

    As ``shared.kernels.fp8.quantise_rows``, in one launch.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    whole = torch.empty(x.shape, dtype=fp8.FORMAT, device=x.device)
    scales = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    width = min(padded(x.shape[1]), _SPAN)
    quantise_row[(x.shape[0],)](
        (x, whole, scales), x.stride(0), Rows(x.shape[1], width), **_OPTIONS
    )
    return whole, scales
