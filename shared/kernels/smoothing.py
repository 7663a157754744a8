"""Weights whose inputs are easier to round: every input channel about as large as its weights.

A few channels of the residual stream are many times larger than the others, and rounding by
their measure loses the others. Dividing channel c by ``s[c]`` in the norm's weight (or in the
rows of ``up``, for the inputs of ``down``) and multiplying column c of what follows by it changes
no result (SmoothQuant, Xiao et al. 2023, with root mean squares in place of maxima). Keys and
values stay those of the plain model, so prefill and decode may differ in their kind.

The sizes of channels are measured on random tokens: they need neither a tokenizer nor a text, and
serve nearly as well (docs/decisions/0007).
"""

from typing import Final

import torch
from msgspec import structs
from torch.nn import functional

from shared.kernels import fallback
from shared.kernels.llama_parts import LayerParts, Projection, StackShape

_SEQUENCES: Final = 8
_TOKENS: Final = 64
_ALPHA: Final = 0.4
_SMALLEST: Final = 1e-5


class Smoother:
    """Takes a model's layers in order: each is run, to know the sizes in the next one.

    Args:
        shape: of all layers.
        embedding: [vocabulary, hidden].
        rotary: frequencies and factor of the rotary embedding.
    """

    def __init__(
        self,
        shape: StackShape,
        embedding: torch.Tensor,
        rotary: tuple[torch.Tensor, float],
    ) -> None:
        self._shape = shape
        generator = torch.Generator().manual_seed(0)
        spread = torch.rand((_SEQUENCES, _TOKENS), generator=generator)
        vocabulary = embedding.shape[0]
        ids = (vocabulary**spread).long().clamp(max=vocabulary - 1)
        x = functional.embedding(ids, embedding.detach()).float()
        self._x = torch.where(x.isfinite().all(-1, keepdim=True), x, 0.0)
        cos, sin = fallback.rotary_table(torch.arange(_TOKENS), *rotary)
        self._cos, self._sin = cos.repeat(_SEQUENCES, 1), sin.repeat(_SEQUENCES, 1)

    @torch.no_grad()
    def __call__(self, parts: LayerParts) -> LayerParts:
        """Return the layer with its channels evened out."""
        normed = self._norm(self._x, parts.attention_norm)
        qkv = _scales(normed, parts.q, parts.k, parts.v)
        self._x = self._x + self._attention(parts, normed)
        normed = self._norm(self._x, parts.mlp_norm)
        gate_up = _scales(normed, parts.gate, parts.up)
        inner = fallback.silu_mul(_apply(parts.gate, normed), _apply(parts.up, normed))
        down = _scales(inner, parts.down)
        self._x = self._x + _apply(parts.down, inner)
        return structs.replace(
            parts,
            attention_norm=parts.attention_norm.float() / qkv,
            q=_columns(parts.q, qkv),
            k=_columns(parts.k, qkv),
            v=_columns(parts.v, qkv),
            mlp_norm=parts.mlp_norm.float() / gate_up,
            gate=_columns(parts.gate, gate_up),
            up=_rows(_columns(parts.up, gate_up), down),
            down=_columns(parts.down, down),
        )

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fallback.rms_norm(x, weight.float(), self._shape.eps)

    def _attention(self, parts: LayerParts, normed: torch.Tensor) -> torch.Tensor:
        """Attend within each sequence; windows are left out, as only sizes are wanted."""
        shape = self._shape

        def heads(linear: Projection, count: int) -> torch.Tensor:
            return _apply(linear, normed).view(-1, count, shape.head_dim)

        def placed(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
            x = x if norm is None else self._norm(x, norm)
            return fallback.rotate(x, self._cos, self._sin)

        q = placed(heads(parts.q, shape.heads), parts.q_norm)
        k = placed(heads(parts.k, shape.kv_heads), parts.k_norm)
        v = heads(parts.v, shape.kv_heads)
        q, k, v = (
            t.view(_SEQUENCES, _TOKENS, -1, shape.head_dim).transpose(1, 2) for t in (q, k, v)
        )
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=shape.scaling, enable_gqa=True
        )
        return _apply(parts.o, attended.transpose(1, 2).flatten(2))


def _apply(linear: Projection, x: torch.Tensor) -> torch.Tensor:
    bias = None if linear.bias is None else linear.bias.float()
    return functional.linear(x, linear.weight.float(), bias)


def _scales(x: torch.Tensor, *linears: Projection) -> torch.Tensor:
    """Return what to divide x [..., channels] by, of geometric mean 1."""
    weight = torch.cat([linear.weight.detach().float() for linear in linears])
    inputs = x.flatten(0, -2).square().mean(0).sqrt().clamp(min=_SMALLEST)
    columns = weight.square().mean(0).sqrt().clamp(min=_SMALLEST)
    scales = inputs**_ALPHA / columns ** (1 - _ALPHA)
    return scales / scales.log().mean().exp()


def _columns(linear: Projection, scales: torch.Tensor) -> Projection:
    return Projection(weight=linear.weight.detach().float() * scales, bias=linear.bias)


def _rows(linear: Projection, scales: torch.Tensor) -> Projection:
    bias = None if linear.bias is None else linear.bias.detach().float() / scales
    return Projection(weight=linear.weight.detach().float() / scales[:, None], bias=bias)
