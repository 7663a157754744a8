"""``LlamaStack`` in plain torch, for machines where nothing can be compiled."""

import torch

from shared.kernels import fallback
from shared.kernels.llama_parts import LayerParts, Projection, StackKinds, StackShape
from shared.kernels.types import AttentionBatch, LinearKind


class _Linear:
    def __init__(self, linear: Projection, kind: LinearKind) -> None:
        self._kind: LinearKind = kind
        self._weight = fallback.weights_of(linear.weight, kind)
        self._bias = None if linear.bias is None else linear.bias.detach().float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return fallback.linear(x, self._weight, self._bias, self._kind)


class _Layer:
    def __init__(self, parts: LayerParts, kinds: StackKinds) -> None:
        self.q, self.k, self.v = (_Linear(p, kinds.qkv) for p in (parts.q, parts.k, parts.v))
        self.o, self.down = _Linear(parts.o, kinds.o), _Linear(parts.down, kinds.down)
        self.gate, self.up = (_Linear(p, kinds.gate_up) for p in (parts.gate, parts.up))
        self.attention_norm = parts.attention_norm.detach().float()
        self.mlp_norm = parts.mlp_norm.detach().float()
        self.q_norm = None if parts.q_norm is None else parts.q_norm.detach().float()
        self.k_norm = None if parts.k_norm is None else parts.k_norm.detach().float()
        self.window = parts.window or 0


class TorchStack:
    """See ``StackBackend``."""

    def __init__(self, shape: StackShape, kinds: StackKinds) -> None:
        self._shape = shape
        self._kinds = kinds
        self._layers: list[_Layer] = []
        self._pools: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._head: tuple[torch.Tensor, _Linear] | None = None

    def add(self, parts: LayerParts) -> None:
        """Copy one layer's weights."""
        self._layers.append(_Layer(parts, self._kinds))

    def set_head(self, norm: torch.Tensor, head: Projection) -> None:
        """Copy the head."""
        self._head = (norm.detach().float(), _Linear(head, self._kinds.head))

    def attach(self, k: list[torch.Tensor], v: list[torch.Tensor]) -> None:
        """Use these pools."""
        if not len(k) == len(v) == len(self._layers):
            raise RuntimeError("one K and one V pool per layer expected")
        self._pools = list(zip(k, v, strict=True))

    def run(
        self,
        x: torch.Tensor,
        batch: AttentionBatch,
        rotary: tuple[torch.Tensor, torch.Tensor],
        layers: range,
        *,
        kv_only: bool,
    ) -> None:
        """Run layers one after the other."""
        if not self._pools:
            raise RuntimeError("attach a KV pool first")
        slots = batch.slots(self._pools[0][0].shape[1])
        for index in layers:
            layer = self._layers[index]
            if kv_only:
                self._queries(layer, x, rotary, self._pools[index], slots)
                continue
            x += self._attention(layer, x, batch, rotary, self._pools[index], slots)
            normed = fallback.rms_norm(x, layer.mlp_norm, self._shape.eps)
            x += layer.down(fallback.silu_mul(layer.gate(normed), layer.up(normed)))

    def logits(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Final norm and output projection of some rows; nobody has looked for the best tokens."""
        if self._head is None:
            raise RuntimeError("the model has no head")
        norm, linear = self._head
        return linear(fallback.rms_norm(x[rows], norm, self._shape.eps)), None

    def _attention(
        self,
        layer: _Layer,
        x: torch.Tensor,
        batch: AttentionBatch,
        rotary: tuple[torch.Tensor, torch.Tensor],
        pools: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
    ) -> torch.Tensor:
        shape = self._shape
        q = self._queries(layer, x, rotary, pools, slots)
        attended = fallback.paged_attention(q, pools, batch, shape.scaling, layer.window, 0.0, None)
        return layer.o(attended.flatten(1))

    def _queries(
        self,
        layer: _Layer,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        pools: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Write keys and values; return the queries."""
        shape = self._shape
        normed = fallback.rms_norm(x, layer.attention_norm, shape.eps)
        q = layer.q(normed).view(-1, shape.heads, shape.head_dim)
        k = layer.k(normed).view(-1, shape.kv_heads, shape.head_dim)
        v = layer.v(normed).view(-1, shape.kv_heads, shape.head_dim)
        if layer.q_norm is not None:
            q = fallback.rms_norm(q, layer.q_norm, shape.eps)
        if layer.k_norm is not None:
            k = fallback.rms_norm(k, layer.k_norm, shape.eps)
        k = fallback.rotate(k, *rotary)
        fallback.kv_write(k, v, pools[0], pools[1], slots)
        return fallback.rotate(q, *rotary)
