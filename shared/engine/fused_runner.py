"""Our own layers: the whole of a Llama-family model but the embedding is one native call."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from shared.engine.runner import Logits
from shared.engine.step import OnLayer, PackedStep
from shared.kernels.llama import LlamaStack
from shared.kernels.ops import rotary_table


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
        """Run all layers, in one call where nobody waits for single ones; fp32 logits."""
        x = functional.embedding(step.token_ids[0], self._embedding).float()
        rotary = rotary_table(step.positions[0], self.stack.frequencies, self.stack.factor)
        if on_layer is None:
            self.stack.run(x, step.batch, rotary)
        else:
            for layer in range(self.stack.num_layers):
                self.stack.run(x, step.batch, rotary, range(layer, layer + 1))
                on_layer(layer)
        return Logits(*self.stack.logits(x, keep))
