"""What runs the model: transformers' layers with our attention, or our fused layers."""

from collections.abc import Sequence
from typing import Protocol

import torch

from shared.engine.step import OnLayer, PackedStep


class ModelRunner(Protocol):
    """A model's forward pass over a paged KV pool. Use from one thread only."""

    @property
    def name(self) -> str:
        """Which layers these are, for people."""
        ...

    def attach(self, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> None:
        """Use these pools [blocks, block_size, heads, dim], one K and one V per layer."""
        ...

    def logits(
        self, step: PackedStep, keep: torch.Tensor, on_layer: OnLayer | None = None
    ) -> torch.Tensor:
        """Write the step's KV and return logits [len(keep), vocabulary] of rows ``keep`` int64.

        ``on_layer(i)`` is called once layer ``i``'s KV is written, for every layer in order.
        """
        ...
