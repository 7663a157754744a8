"""Our int8 and int4 linear layers in the place of a transformers model's own."""

from typing import Final

import torch
from torch import nn

from shared.engine.loading import HfModel
from shared.kernels.int4 import warn_off_grid
from shared.kernels.ops import PackedLinear
from shared.kernels.types import INT4, LinearKind
from shared.precision import Precision

QUANTISED: Final[dict[Precision, LinearKind]] = {"int8": "int8", "int4": "int4a16"}
"""Precisions whose weights are rounded to integers, and the arithmetic of their layers."""


class QuantisedLinear(nn.Module):
    """A drop-in for ``nn.Linear`` with weights in ``kind``; the original's are not kept."""

    def __init__(self, linear: nn.Linear, kind: LinearKind) -> None:
        super().__init__()
        self._packed = PackedLinear(linear.weight, linear.bias, kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., outputs] for x [..., inputs], in the dtype of ``x``."""
        rows = x.reshape(-1, x.shape[-1])
        return self._packed(rows).view(*x.shape[:-1], -1)


def quantise_linears(model: HfModel, precision: Precision) -> None:
    """Replace every plain linear layer of the decoder; embeddings, experts and head stay.

    The head may share its weights with the embedding, and experts are no linear layers in
    transformers. Nothing is done for precisions that are not in ``QUANTISED``.
    """
    kind = QUANTISED.get(precision)
    if kind is None:
        return
    head = model.get_output_embeddings()
    warned = kind not in INT4
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear or child is head:
                continue
            if not warned:
                warn_off_grid(child.weight)
                warned = True
            setattr(module, name, QuantisedLinear(child, kind))
