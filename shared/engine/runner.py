"""What runs the model: transformers' layers with our attention, or our fused layers."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from shared.engine.step import OnLayer, PackedStep


class Logits(NamedTuple):
    """``values`` [rows, vocabulary]. ``best``: of each row the first of its best tokens.

    It is -1 where a logit is NaN or infinite, and None where nobody has looked yet.
    """

    values: torch.Tensor
    best: torch.Tensor | None = None


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
    ) -> Logits:
        """Write the step's KV and return logits of rows ``keep`` int64.

        ``on_layer(i)`` is called once layer ``i``'s KV is written, for every layer in order.
        """
        ...
