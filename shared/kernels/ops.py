"""Stand-alone kernels for any model: native where they could be built, else plain torch."""

import torch

from shared.kernels import fallback
from shared.kernels.load import native, operators
from shared.kernels.types import BLOCK_COLUMNS, KIND_NUMBERS, AttentionBatch, LinearKind


def paged_attention(
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    batch: AttentionBatch,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend q [rows, heads, k_dim] over a KV pool; returns [rows, heads, v_dim] like ``q``.

    ``pools`` are one layer's K and V, [blocks, block_size, kv_heads, dim] in fp32, bf16 or
    fp16, or int8 rows (``kv_rows``), with the step's own K and V already written. A query sees
    keys up to itself, with ``window`` only those later than ``query - window``. Scores are
    ``softcap * tanh(s / softcap)`` where a cap is given; ``sinks`` fp32 [heads] are logits that
    take weight and give no value. Slots that no sequence uses may hold anything.

    Raises:
        RuntimeError: shapes or dtypes do not fit, or a table leaves the pool.
    """
    bound, cap = window or 0, softcap or 0.0
    if not native():
        return fallback.paged_attention(q, pools, batch, scaling, bound, cap, sinks)
    out: torch.Tensor = operators().paged_attention(
        q,
        *pools,
        batch.tables,
        batch.query_start,
        batch.context,
        scaling,
        bound,
        cap,
        sinks,
    )
    return out


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store k, v [rows, kv_heads, dim] in ``slots`` int64 [rows] of one layer's pools.

    Raises:
        RuntimeError: shapes do not fit, or a slot is outside the pool.
    """
    write = operators().kv_write if native() else fallback.kv_write
    write(k, v, k_pool, v_pool, slots)


def place_threads(own: int, cpus: tuple[int, ...]) -> bool:
    """Have ``own`` threads compute what this thread runs, and one more on each of ``cpus``.

    False, and only ``own`` of them, where that cannot be: no such CPU, or no native kernels.
    """
    return native() and bool(operators().place_threads(own, cpus))


def kv_convert(
    source: torch.Tensor,
    target: torch.Tensor,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
) -> None:
    """Put blocks of a pool into one of another dtype; both are [blocks, block_size, heads, width].

    ``source_blocks`` and ``target_blocks`` are int64 [n]. The calling thread computes alone.

    Raises:
        RuntimeError: shapes do not fit, or a block is outside its pool.
    """
    convert = operators().kv_convert if native() else fallback.kv_convert
    convert(source, target, source_blocks, target_blocks)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / rms(x) * weight`` for x [rows, width]; ``weight`` fp32 [width]."""
    out: torch.Tensor = (operators().rms_norm if native() else fallback.rms_norm)(x, weight, eps)
    return out


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` for two [rows, width] of one dtype."""
    out: torch.Tensor = (operators().silu_mul if native() else fallback.silu_mul)(gate, up)
    return out


def rotary_table(
    positions: torch.Tensor, frequencies: torch.Tensor, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin fp32 [rows, frequencies] of ``positions`` int64 [rows]."""
    table = operators().rotary_table if native() else fallback.rotary_table
    cos, sin = table(positions, frequencies, factor)
    return cos, sin


class PackedLinear:
    """A linear layer in one of the kinds' arithmetic; weights are copied, not kept.

    int8 (see ``LinearKind``): activations are quantised per row, so that a row's result does not
    depend on its neighbours. bf16: activations rounded to bf16, sums in fp32.

    Args:
        weight: [outputs, inputs], any float dtype.
        bias: [outputs] or None.
        kind: arithmetic.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kind: LinearKind) -> None:
        self.kind = kind
        self.outputs, self.inputs = weight.shape
        self.packed, self.bias = pack(weight, bias, kind)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, outputs] in the dtype of x [rows, inputs]."""
        if not native():
            return fallback.linear(x, self.packed, self.bias, self.kind).to(x.dtype)
        number = KIND_NUMBERS[self.kind]
        out: torch.Tensor = operators().linear(x, self.packed, self.bias, number, self.outputs)
        return out


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None, kind: LinearKind
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weights and bias as the operators in use take them."""
    bias = None if bias is None else bias.detach().float()
    if not native():
        return fallback.weights_of(weight, kind), bias
    wide = weight.detach().float().contiguous()
    packed: torch.Tensor = operators().pack_linear(wide, KIND_NUMBERS[kind])
    return packed, None if bias is None else padded(bias)


def padded(values: torch.Tensor) -> torch.Tensor:
    """Return fp32 values with zeros up to a whole block of columns."""
    size = -(-values.numel() // BLOCK_COLUMNS) * BLOCK_COLUMNS
    out = torch.zeros(size)
    out[: values.numel()] = values
    return out
