"""One token's K or V of one head as a KV pool holds it, in plain torch.

A row of an int8 or fp8 pool is [dim] elements and then their fp32 scale, the largest magnitude
over the format's largest: [..., dim + ``SCALE_BYTES``]. Other pools hold the elements themselves.
The scale at the tail of its row is what vLLM's int8_per_token_head has.
"""

import torch

from shared.kernels.fp8 import quantise_rows
from shared.kv.layout import SCALE_BYTES

_LARGEST = 127
_SCALED = (torch.int8, torch.float8_e4m3fn)


def is_scaled(pool: torch.Tensor) -> bool:
    """Return whether rows of a pool end with a scale."""
    return pool.dtype in _SCALED


def head_dim(pool: torch.Tensor) -> int:
    """Return the elements of a head in rows [..., width] of a pool."""
    width = pool.shape[-1]
    return width - SCALE_BYTES if is_scaled(pool) else width


def to_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return floats x [..., dim] as a pool of ``dtype`` holds them.

    A NaN or infinity makes the scale of its int8 or fp8 row NaN, and so every element.
    """
    if dtype == torch.float8_e4m3fn:
        eighths, scale = quantise_rows(x)
        return torch.cat((eighths.view(torch.uint8), scale.view(torch.uint8)), dim=-1).view(dtype)
    if dtype != torch.int8:
        return x.to(dtype)
    wide = x.float()
    most = wide.abs().amax(dim=-1, keepdim=True)
    scale = most / _LARGEST
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    inverse = torch.where(inverse.isfinite(), inverse, 0.0)
    whole = (wide * inverse).round().clamp(-_LARGEST, _LARGEST).nan_to_num().to(torch.int8)
    scale = _apart(torch.where(most.isfinite(), scale, torch.nan))
    return torch.cat((whole, scale.view(torch.int8)), dim=-1)


def from_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of a pool as floats [..., dim]: fp32 where they are scaled, else as they are."""
    if not is_scaled(rows):
        return rows
    dim = head_dim(rows)
    return rows[..., :dim].float() * _apart(rows[..., dim:]).view(torch.float32)


def _apart(x: torch.Tensor) -> torch.Tensor:
    """Return a copy with plain strides, as a view of other elements needs them."""
    return x.clone(memory_format=torch.contiguous_format)
