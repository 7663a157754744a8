"""Weights on 4-bit grids, in torch: what ``kernels/int4_fit.cpp`` does for one group at a time."""

import logging
from typing import Final

import torch
from torch.nn import functional

from shared.kernels.types import GROUP

log = logging.getLogger(__name__)

_SAMPLE: Final = 64
_SEEN: Final = 0.02
"""Relative: bf16 moves weights by 0.002, rounding any weights to 4 bits by 0.07 or so."""

_TOP: Final = 15
_STEPS: Final = (15, 14, 13, 12, 11, 10, 9, 8, 16, 17, 18)
"""Grids that are tried: so many steps between a group's ends."""
_MOST: Final = 65504.0
"""The largest number of fp16."""
_NEAR: Final = 0.03
"""A root mean square error of so many steps is what bf16 does to weights on a grid."""


def warn_off_grid(weight: torch.Tensor) -> None:
    """Say so in the log where weights [outputs, inputs] were not made for 4 bits."""
    sample = weight.detach()[:_SAMPLE].float()
    moved = float((on_grid(sample) - sample).norm() / sample.norm())
    if moved > _SEEN:
        log.warning(
            "int4 moves this model's weights by %.0f %%, which costs quality; int8 hardly does. "
            "Nothing is lost on models whose file holds 4-bit weights, as GGUF's Q4_0 and Q4_1",
            100 * moved,
        )


def on_grid(weight: torch.Tensor) -> torch.Tensor:
    """Return fp32 weights [outputs, inputs], each rounded to ``scale * q + least``, q 0 to 15.

    Each output and group of ``GROUP`` inputs has its own two numbers, both fp16. Weights on such
    a grid stay what they are, up to fp16; for others, the best of several grids is taken, each
    refined by least squares (as in llama.cpp's ``make_qkx2_quants``).
    """
    outputs, inputs = weight.shape
    padded = functional.pad(weight.float()[:, None], (0, -inputs % GROUP), mode="replicate")
    groups = padded.reshape(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    best = torch.zeros_like(groups)
    error = torch.full_like(low, torch.inf)
    step = torch.zeros_like(low)
    left = torch.arange(len(groups))
    for steps in _STEPS:
        w = groups[left]
        scale = (high[left] - low[left]) / steps
        least = low[left] + max(steps - _TOP, 0) / 2 * scale
        for _ in range(2):
            rounded, q, scale = _rounded(w, scale, least)
            missed = (rounded - w).square().sum(1, keepdim=True)
            better = (missed < error[left])[:, 0]
            at = left[better]
            best[at], error[at], step[at] = rounded[better], missed[better], scale[better]
            scale, least = _refined(w, q)
        left = left[(error[left] > (_NEAR * step[left]).square() * GROUP)[:, 0]]
        if len(left) == 0:
            break
    return best.view(outputs, -1)[:, :inputs].contiguous()


def _rounded(
    w: torch.Tensor, scale: torch.Tensor, least: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weights on the grid, their whole numbers, and the scale as fp16 has it."""
    scale, least = (x.clamp(-_MOST, _MOST).half().float() for x in (scale, least))
    q = torch.where(scale > 0, (w - least) / scale, 0.0).round().clamp(0, _TOP)
    return q * scale + least, q, scale


def _refined(w: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and least value that fit best where the whole numbers stay as they are."""
    mean_q, mean = q.mean(1, keepdim=True), w.mean(1, keepdim=True)
    spread = (q - mean_q).square().sum(1, keepdim=True)
    scale = ((q - mean_q) * (w - mean)).sum(1, keepdim=True) / spread
    scale = torch.where(spread > 0, scale, 0.0).clamp(min=0)
    return scale, mean - scale * mean_q
