"""The kernels in plain torch: what runs where nothing can be compiled, and what tests compare.

Same arguments and results as the native operators, except that weights are not packed.
"""

import torch
from torch.nn import functional

from shared.kernels import fp8
from shared.kernels.int4 import on_grid
from shared.kernels.kv_rows import from_rows, head_dim, to_rows
from shared.kernels.types import GROUP, INT4, INT8, AttentionBatch, LinearKind

_ROWS_AT_ONCE = 256
"""Query rows whose scores are held at a time."""


def paged_attention(
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    batch: AttentionBatch,
    scaling: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend q [rows, heads, k_dim]; returns [rows, heads, v_dim] in the dtype of ``q``."""
    k_pool, v_pool = pools
    block_size, kv_heads = k_pool.shape[1], k_pool.shape[2]
    out = q.new_empty((q.shape[0], q.shape[1], head_dim(v_pool)))
    group = q.shape[1] // kv_heads
    starts, contexts = batch.query_start.tolist(), batch.context.tolist()
    for sequence, context in enumerate(contexts):
        first, last = starts[sequence], starts[sequence + 1]
        start = context - (last - first)
        low = max(0, start - window + 1) if window else 0
        slots = _slots(batch.tables[sequence], low, context, block_size)
        k = from_rows(k_pool.flatten(0, 1)[slots]).float().permute(1, 2, 0)
        v = from_rows(v_pool.flatten(0, 1)[slots]).float().transpose(0, 1)
        keys = torch.arange(low, context)
        for row in range(first, last, _ROWS_AT_ONCE):
            end = min(row + _ROWS_AT_ONCE, last)
            position = torch.arange(start + row - first, start + end - first)
            hidden = keys[None] > position[:, None]
            if window:
                hidden |= keys[None] <= position[:, None] - window
            grouped = q[row:end].float().transpose(0, 1).reshape(kv_heads, group, end - row, -1)
            scores = torch.matmul(grouped, k[:, None]) * scaling
            weights = _softmax(scores, hidden, softcap, sinks)
            attended = torch.matmul(weights, v[:, None]).flatten(0, 1)
            out[row:end] = attended.transpose(0, 1).to(out.dtype)
    return out


def _slots(table: torch.Tensor, low: int, high: int, block_size: int) -> torch.Tensor:
    positions = torch.arange(low, high)
    return table[positions // block_size].long() * block_size + positions % block_size


def _softmax(
    scores: torch.Tensor, hidden: torch.Tensor, softcap: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Weights of scores [kv heads, group, rows, keys]; a sink counts and is dropped."""
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.float().view(scores.shape[0], scores.shape[1], 1, 1)
    column = column.expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store k, v [rows, kv heads, dim] in ``slots`` [rows] of the pools."""
    for pool, fresh in ((k_pool, k), (v_pool, v)):
        target, rows = pool.flatten(0, 1), to_rows(fresh, pool.dtype)
        if pool.dtype == fp8.FORMAT:  # which torch copies by index as bytes only
            target, rows = target.view(torch.uint8), rows.view(torch.uint8)
        target.index_copy_(0, slots, rows)


def kv_convert(
    source: torch.Tensor,
    target: torch.Tensor,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
) -> None:
    """Put blocks of a pool into one of another dtype."""
    target[target_blocks] = to_rows(from_rows(source[source_blocks]), target.dtype)


def quantised(x: torch.Tensor, largest: int, scale_dtype: torch.dtype) -> torch.Tensor:
    """Return fp32 values of x [rows, inputs] after rounding to integers up to ``largest``.

    Each group of ``GROUP`` inputs has its own scale, rounded to ``scale_dtype``. A NaN or
    infinity makes its whole group NaN.
    """
    rows, inputs = x.shape
    count = -(-inputs // GROUP)  # -1 would not do where there are no rows
    groups = functional.pad(x.float(), (0, -inputs % GROUP)).view(rows, count, GROUP)
    most = groups.abs().amax(dim=-1, keepdim=True)
    scale = (most / largest).clamp(max=torch.finfo(scale_dtype).max).to(scale_dtype).float()
    if scale_dtype == torch.float16:  # a coarse subnormal: cut nothing off
        scale = torch.where(scale * (largest + 0.5) < most, scale + 2**-24, scale)
    scale = torch.where(most.isfinite(), scale, torch.nan)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    inverse = torch.where(inverse.isinf(), 0.0, inverse)
    whole = (groups * inverse).round().clamp(-largest, largest) * scale
    return whole.view(rows, count * GROUP)[:, :inputs]


def weights_of(weight: torch.Tensor, kind: LinearKind) -> torch.Tensor:
    """Return fp32 or bf16 weights as ``linear`` takes them: rounded ones with their scales on."""
    wide = weight.detach().float()
    if kind in INT8:
        return quantised(wide, 127, torch.float16)
    if kind in INT4:
        return on_grid(wide)
    return wide.to(torch.bfloat16 if kind == "bf16" else torch.float32)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: LinearKind
) -> torch.Tensor:
    """Multiply x [rows, inputs] with what ``weights_of`` made; fp32 [rows, outputs]."""
    if kind in INT8 | INT4:
        x = quantised(x, 127 * 256 if kind.endswith("a16") else 127, torch.float32)
    y = functional.linear(x.to(weight.dtype), weight).float()
    return y if bias is None else y + bias


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / rms(x) * weight`` over the last axis, computed in fp32."""
    wide = x.float()
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * factor * weight).to(x.dtype)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``, computed in fp32."""
    return (functional.silu(gate.float()) * up.float()).to(gate.dtype)


def rotary_table(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [rows, frequencies] of ``positions`` [rows]."""
    angle = positions[:, None].float() * frequencies
    return angle.cos() * factor, angle.sin() * factor


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` elements of x [rows, heads, dim], halves paired."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
