"""Our own layers: the whole of a Llama-family model but the embedding is one native call."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from shared.engine.runner import Logits
from shared.engine.step import OnLayer, PackedStep
from shared.kernels.llama import LlamaStack
from shared.kernels.ops import rotary_table
from shared.kernels.types import AttentionBatch

_SPARED_ROWS = 16
"""So many rows without logits pay for the last layer's second call."""


class FusedRunner:
    """See ``ModelRunner``. ``embedding`` [vocabulary, hidden] may be of any float dtype."""

    name = "fused layers"

    def __init__(self, stack: LlamaStack, embedding: torch.Tensor) -> None:
        self.stack = stack
        self._embedding = embedding

    def attach(self, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> None:
        """Use these pools."""
        self.stack.attach(k, v)

    def logits(
        self, step: PackedStep, keep: torch.Tensor, on_layer: OnLayer | None = None
    ) -> Logits:
        """Run all layers, in one call where nobody waits for single ones; fp32 logits.

        Of a prompt the last layer needs the KV of all rows, and all else of its last row only.
        """
        x = functional.embedding(step.token_ids[0], self._embedding).float()
        rotary = rotary_table(step.positions[0], self.stack.frequencies, self.stack.factor)
        last = self.stack.num_layers - 1
        few = len(x) - len(keep) >= _SPARED_ROWS
        self._run(range(last if few else last + 1), x, step.batch, rotary, on_layer)
        if few:
            self.stack.run(x, step.batch, rotary, range(last, last + 1), kv_only=True)
            if len(keep):
                x = x[keep]
                here = (rotary[0][keep], rotary[1][keep])
                # Writes the KV of these rows again, so the layer is not written until now.
                self.stack.run(x, step.batch.alone(keep), here, range(last, last + 1))
                keep = torch.arange(len(keep))
            if on_layer is not None:
                on_layer(last)
        return Logits(*self.stack.logits(x, keep))

    def _run(
        self,
        layers: range,
        x: torch.Tensor,
        batch: AttentionBatch,
        rotary: tuple[torch.Tensor, torch.Tensor],
        on_layer: OnLayer | None,
    ) -> None:
        if on_layer is not None:
            for layer in layers:
                self.stack.run(x, batch, rotary, range(layer, layer + 1))
                on_layer(layer)
        elif layers:
            self.stack.run(x, batch, rotary, layers)
