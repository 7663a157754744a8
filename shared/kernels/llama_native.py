"""Native side of ``LlamaStack``: packs weights and calls ``torch.classes.diptych.LlamaStack``."""

from typing import Any

import torch

from shared.kernels.llama_parts import LayerParts, Projection, StackKinds, StackShape
from shared.kernels.load import operators
from shared.kernels.ops import pack, padded
from shared.kernels.types import BLOCK_COLUMNS, KIND_NUMBERS, AttentionBatch, LinearKind

_HALF = BLOCK_COLUMNS // 2

Packed = tuple[torch.Tensor, torch.Tensor | None]


class NativeStack:
    """See ``StackBackend``."""

    def __init__(self, shape: StackShape, kinds: StackKinds) -> None:
        self._shape = shape
        self._kinds = kinds
        self._native: Any = torch.classes.diptych.LlamaStack(
            [shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.inter, shape.rotary],
            shape.scaling,
        )

    def add(self, parts: LayerParts) -> None:
        """Pack one layer: q, k and v as one weight, gate and up interleaved by 16 columns."""
        kinds = self._kinds
        linears: list[Packed] = [
            _pack(_joined(parts.q, parts.k, parts.v), kinds.qkv),
            _pack(parts.o, kinds.o),
            _pack_gated(parts.gate, parts.up, kinds.gate_up),
            _pack(parts.down, kinds.down),
        ]
        numbers = [KIND_NUMBERS[k] for k in (kinds.qkv, kinds.o, kinds.gate_up, kinds.down)]
        norms = [parts.attention_norm, parts.mlp_norm, parts.q_norm, parts.k_norm]
        self._native.add_layer(
            [packed for packed, _ in linears],
            [bias for _, bias in linears],
            numbers,
            [None if norm is None else norm.detach().float().contiguous() for norm in norms],
            self._shape.eps,
            parts.window or 0,
        )

    def set_head(self, norm: torch.Tensor, head: Projection) -> None:
        """Pack the head."""
        packed, bias = _pack(head, self._kinds.head)
        self._native.set_head(
            norm.detach().float().contiguous(),
            self._shape.eps,
            packed,
            bias,
            KIND_NUMBERS[self._kinds.head],
            head.weight.shape[0],
        )

    def attach(self, k: list[torch.Tensor], v: list[torch.Tensor]) -> None:
        """Hand over the pools."""
        self._native.attach(k, v)

    def run(
        self,
        x: torch.Tensor,
        batch: AttentionBatch,
        rotary: tuple[torch.Tensor, torch.Tensor],
        layers: range,
        *,
        kv_only: bool,
    ) -> None:
        """Run a contiguous range of layers in one call."""
        self._native.run(
            x,
            batch.tables,
            batch.query_start,
            batch.context,
            *rotary,
            layers.start,
            layers.stop,
            kv_only,
        )

    def logits(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Final norm and output projection of some rows, and their best tokens."""
        out: tuple[torch.Tensor, torch.Tensor] = self._native.logits(x, rows)
        return out


def _pack(linear: Projection, kind: LinearKind) -> Packed:
    return pack(linear.weight, linear.bias, kind)


def _joined(*linears: Projection) -> Projection:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if biases and len(biases) != len(linears):
        biases = [_bias(linear) for linear in linears]
    weight = torch.cat([linear.weight for linear in linears])
    return Projection(weight=weight, bias=torch.cat(biases) if biases else None)


def _bias(linear: Projection) -> torch.Tensor:
    return linear.weight.new_zeros(linear.weight.shape[0]) if linear.bias is None else linear.bias


def _pack_gated(gate: Projection, up: Projection, kind: LinearKind) -> Packed:
    first, second = (p.weight.detach().float().contiguous() for p in (gate, up))
    packed: torch.Tensor = operators().pack_linear(first, KIND_NUMBERS[kind], second)
    if gate.bias is None and up.bias is None:
        return packed, None
    bias = torch.zeros(-(-len(first) // _HALF), 2, _HALF)
    for i, part in enumerate((gate, up)):
        bias[:, i] = padded(_bias(part).detach().float())[: bias[:, i].numel()].view(-1, _HALF)
    return packed, bias.view(-1)
