"""fp8 linear layers in the place of a transformers model's own.

Weights are e4m3 with a scale per output, rounded once. Activations are rounded anew in each step,
with a scale per token: what becomes of a token does not depend on its neighbours in the batch.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import ScalingType

from shared.engine.loading import HfModel
from shared.kernels import fp8

QuantiseRows = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From x [rows, n] to e4m3 [rows, n] and fp32 scales [rows, 1]."""

_GRAIN: Final = 16
"""Inputs and outputs must be multiples of it, says torch's matrix product of e4m3."""
_ROUTERS: Final = ("gate", "router")
"""Choose experts: too small to gain anything, and a rounded choice is another model."""


def multiply_rows(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return bf16 [rows, outputs] of e4m3 x [rows, inputs] and weight [outputs, inputs].

    Scales are fp32 [rows, 1] and [outputs, 1]. Sums are fp32, on Hopper as well.
    """
    out: torch.Tensor = functional.scaled_mm(
        x,
        weight.t(),  # the second factor is column after column
        x_scales,
        ScalingType.RowWise,
        weight_scales.t(),
        ScalingType.RowWise,
        bias=bias,
        output_dtype=torch.bfloat16,
    )
    return out


class Fp8Linear(nn.Module):
    """A drop-in for a bf16 ``nn.Linear``; its weights are not kept.

    Tensors are buffers, so that moving the model moves them. None is called ``weight``: a model
    that brings activations into its weights' format would bring them into e4m3, unscaled.
    """

    rounded: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear, quantise: QuantiseRows) -> None:
        super().__init__()
        rounded, scales = fp8.quantise_rows(linear.weight)
        self._quantise = quantise
        self.register_buffer("rounded", rounded)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return bf16 [..., outputs] for x [..., inputs]."""
        rows, scales = self._quantise(x.reshape(-1, x.shape[-1]))
        out = multiply_rows(rows, scales, self.rounded, self.scales, self.bias)
        return out.view(*x.shape[:-1], -1)


def round_linears(model: HfModel, quantise: QuantiseRows) -> list[str]:
    """Replace the linear layers; return the names of those that stay in bf16.

    Embeddings, norms, head, routers and experts that are no linear layers stay as well, unnamed.
    """
    head = model.get_output_embeddings()
    kept: list[str] = []
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear or child is head or name in _ROUTERS:
                continue
            if child.in_features % _GRAIN or child.out_features % _GRAIN:
                kept.append(f"{path}.{name}")
                continue
            setattr(module, name, Fp8Linear(child, quantise))
    return kept
