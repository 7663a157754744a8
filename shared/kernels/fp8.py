"""Rows of e4m3 numbers, each row with an fp32 scale of its own, in plain torch.

A row is divided by its largest magnitude over 448, the largest number of the format. So what
becomes of a row depends on that row alone.
"""

from typing import Final

import torch

FORMAT: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0
LEAST_SCALE: Final = 1e-30
"""Of a row of zeros, or of numbers so small that their scale would be a subnormal."""


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 [..., n] and fp32 scales [..., 1] of x [..., n].

    A NaN or infinity makes the scale of its row NaN, and so every element.
    """
    wide = x.float()
    most = wide.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(most.isfinite(), (most / LARGEST).clamp(min=LEAST_SCALE), torch.nan)
    return (wide / scale).to(FORMAT), scale
