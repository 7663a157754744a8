"""Fused decoder layers of the Llama family: one native call runs any number of layers.

``LlamaStack`` takes the weights of a transformers model (Llama, Mistral, Qwen2, Qwen3) and
replaces its whole forward pass but the embedding. The residual stream is fp32; linear layers
use one ``LinearKind``; keys and values go to the KV pool in the pool's dtype.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from shared.kernels.int4 import warn_off_grid
from shared.kernels.llama_native import NativeStack
from shared.kernels.llama_parts import (
    FUSED_LAYERS,
    LayerParts,
    Projection,
    StackBackend,
    StackShape,
    layer_parts,
    projection,
    stack_kinds,
)
from shared.kernels.llama_torch import TorchStack
from shared.kernels.load import native
from shared.kernels.ops import rotary_table
from shared.kernels.smoothing import Smoother
from shared.kernels.types import AttentionBatch, LinearKind

SMOOTHED_KINDS: Final[frozenset[LinearKind]] = frozenset({"int8"})
"""Kinds whose activations are rounded coarsely enough to need ``Smoother``.

int4 has inputs of 16 bits instead: evening out would take weights off the grids they are on.
"""


class LlamaStack:
    """All decoder layers, final norm and output projection of one model."""

    def __init__(
        self, shape: StackShape, frequencies: torch.Tensor, factor: float, kind: LinearKind
    ) -> None:
        self.shape = shape
        self.kind = kind
        self.num_layers = 0
        self.frequencies = frequencies.detach().float().contiguous()
        self.factor = factor
        self._backend: StackBackend = (NativeStack if native() else TorchStack)(
            shape, stack_kinds(kind)
        )

    @classmethod
    def of_model(cls, model: Any, kind: LinearKind) -> "LlamaStack | None":  # noqa: ANN401
        """Return the stack of a transformers model, or None where its layers are others."""
        layers: Any = getattr(getattr(model, "model", None), "layers", ())
        names = {type(layer).__name__ for layer in layers}
        config = model.config
        if len(names) != 1 or not names <= FUSED_LAYERS or config.hidden_act != "silu":
            return None
        attention, rotary = layers[0].self_attn, model.model.rotary_emb
        shape = StackShape(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            inter=layers[0].mlp.gate_proj.weight.shape[0],
            rotary=2 * rotary.inv_freq.numel(),
            scaling=float(attention.scaling),
            eps=float(config.rms_norm_eps),
        )
        stack = cls(shape, rotary.inv_freq, float(rotary.attention_scaling), kind)
        head = (model.model.norm.weight, projection(model.lm_head))
        stack.fill(map(layer_parts, layers), model.get_input_embeddings().weight, head)
        return stack

    def fill(
        self,
        layers: Iterable[LayerParts],
        embedding: torch.Tensor,
        head: tuple[torch.Tensor, Projection],
    ) -> None:
        """Copy a whole model's weights, smoothed where the kind needs it.

        ``embedding`` is [vocabulary, hidden], ``head`` the final norm and output projection.
        """
        smooth = None
        if self.kind in SMOOTHED_KINDS:
            smooth = Smoother(self.shape, embedding, (self.frequencies, self.factor))
        for parts in layers:
            if self.kind == "int4" and self.num_layers == 0:
                warn_off_grid(parts.gate.weight)
            self.add(parts if smooth is None else smooth(parts))
        self.set_head(*head)

    def add(self, parts: LayerParts) -> None:
        """Copy one more layer's weights into the kind's form."""
        self._backend.add(parts)
        self.num_layers += 1

    def set_head(self, norm: torch.Tensor, head: Projection) -> None:
        """Copy the final norm and the output projection."""
        self._backend.set_head(norm, head)

    def attach(self, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> None:
        """Use these KV pools [blocks, block_size, kv_heads, head_dim], one per layer.

        Raises:
            RuntimeError: their number or shape is not the model's.
        """
        self._backend.attach(list(k), list(v))

    def rotary(self, batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of this step's rows; the same for all layers."""
        return rotary_table(batch.positions(), self.frequencies, self.factor)

    def run(
        self,
        x: torch.Tensor,
        batch: AttentionBatch,
        rotary: tuple[torch.Tensor, torch.Tensor],
        layers: range | None = None,
        *,
        kv_only: bool = False,
    ) -> None:
        """Run ``layers`` (all by default) on x fp32 [rows, hidden], in place; writes KV.

        With ``kv_only``, which takes one layer, that is all, and x stays as it is.

        Raises:
            RuntimeError: shapes do not fit, a table leaves the pool, or no pool is attached.
        """
        chosen = range(self.num_layers) if layers is None else layers
        self._backend.run(x, batch, rotary, chosen, kv_only=kv_only)

    def logits(
        self, x: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return fp32 logits [len(rows), vocabulary] of ``rows`` int64 of x [rows, hidden].

        And of each the first of its best tokens, int64 [len(rows)]: -1 where one is not finite;
        None from a backend that does not look for them.
        """
        return self._backend.logits(x, rows)
