"""Our int8 linear layers in the place of a transformers model's own."""

import torch
from torch import nn

from shared.engine.loading import HfModel
from shared.kernels.ops import PackedLinear


class Int8Linear(nn.Module):
    """A drop-in for ``nn.Linear`` with int8 weights; the original's are not kept."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._packed = PackedLinear(linear.weight, linear.bias, "int8")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., outputs] for x [..., inputs], in the dtype of ``x``."""
        rows = x.reshape(-1, x.shape[-1])
        return self._packed(rows).view(*x.shape[:-1], -1)


def quantise_linears(model: HfModel) -> None:
    """Replace every plain linear layer of the decoder; embeddings, experts and head stay.

    The head may share its weights with the embedding, and experts are no linear layers in
    transformers.
    """
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(module, name, Int8Linear(child))
