"""What a fused Llama-family layer is made of, and how to find it in a transformers model."""

from typing import Any, Final, Protocol

import torch
from msgspec import Struct

from shared.kernels.types import AttentionBatch, LinearKind

FUSED_LAYERS: Final = frozenset(
    {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
)


class StackShape(Struct, frozen=True):
    """Sizes shared by all layers; ``rotary`` is the number of rotated elements of a head."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    rotary: int
    scaling: float
    eps: float


class Projection(Struct, frozen=True):
    """Weight [outputs, inputs] and bias [outputs] or None of one linear layer."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class LayerParts(Struct, frozen=True, kw_only=True):
    """Weights of one decoder layer; ``window`` None means full attention."""

    attention_norm: torch.Tensor
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    mlp_norm: torch.Tensor
    gate: Projection
    up: Projection
    down: Projection
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    window: int | None = None


class StackKinds(Struct, frozen=True):
    """Arithmetic of each projection; q, k and v, and gate and up, share theirs."""

    qkv: LinearKind
    o: LinearKind
    gate_up: LinearKind
    down: LinearKind
    head: LinearKind


def stack_kinds(kind: LinearKind) -> StackKinds:
    """Return the kinds of a stack asked for as ``kind``.

    An error of the head moves the logits directly: in int8, its inputs get 16 bits, and int4
    leaves it 8 bits of weight.
    """
    if kind == "int4":
        return StackKinds("int4a16", "int4a16", "int4a16", "int4a16", "int8a16")
    return StackKinds(kind, kind, kind, kind, "int8a16" if kind == "int8" else kind)


class StackBackend(Protocol):
    """What native and torch layers have in common."""

    def add(self, parts: LayerParts) -> None:
        """Copy one more layer's weights."""
        ...

    def set_head(self, norm: torch.Tensor, head: Projection) -> None:
        """Copy the final norm and the output projection."""
        ...

    def attach(self, k: list[torch.Tensor], v: list[torch.Tensor]) -> None:
        """Use these pools, one per layer."""
        ...

    def run(
        self,
        x: torch.Tensor,
        batch: AttentionBatch,
        rotary: tuple[torch.Tensor, torch.Tensor],
        layers: range,
        *,
        kv_only: bool,
    ) -> None:
        """Run ``layers`` on x, in place; with ``kv_only`` write one layer's KV."""
        ...

    def logits(
        self, x: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits of some rows, and their best tokens or None."""
        ...


def projection(linear: Any) -> Projection:  # noqa: ANN401
    """Return weight and bias of a torch linear layer."""
    return Projection(weight=linear.weight, bias=linear.bias)


def layer_parts(layer: Any) -> LayerParts:  # noqa: ANN401
    """Return the weights of a layer whose class is in ``FUSED_LAYERS``."""
    attention, mlp = layer.self_attn, layer.mlp
    return LayerParts(
        attention_norm=layer.input_layernorm.weight,
        q=projection(attention.q_proj),
        k=projection(attention.k_proj),
        v=projection(attention.v_proj),
        o=projection(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate=projection(mlp.gate_proj),
        up=projection(mlp.up_proj),
        down=projection(mlp.down_proj),
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        window=_window(layer),
    )


def _window(layer: Any) -> int | None:  # noqa: ANN401
    """Return the window that the layer's own attention would pass on."""
    attention = layer.self_attn
    if hasattr(attention, "sliding_window"):
        value = attention.sliding_window
    elif type(layer).__name__ == "MistralDecoderLayer":
        value = getattr(attention.config, "sliding_window", None)
    else:
        value = None
    return None if value is None else int(value)
