"""Scalar quantisation in groups: what the lossy codecs share.

A scale is rounded up to the dtype it is stored in before anything is divided by it, so the
decoder multiplies by exactly what the encoder divided by, and no element falls outside.
"""

from typing import Final

import torch

from shared.errors import NumericalError

MAX_MAGNITUDE: Final = 1e38
"""Beyond it the range of a group would not fit in fp32; attention has overflowed long before."""

_BITS: Final[dict[torch.dtype, torch.dtype]] = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def require_finite(values: torch.Tensor, side: str, layer: int) -> None:
    """Check a side ("K" or "V") of a layer before it is encoded with a loss.

    Raises:
        NumericalError: it holds NaN, Inf, or more than ``MAX_MAGNITUDE``.
    """
    low, high = torch.aminmax(values)
    if not -MAX_MAGNITUDE <= float(low) <= float(high) <= MAX_MAGNITUDE:
        worst = float(low) if not float(low) >= -MAX_MAGNITUDE else float(high)
        raise NumericalError(f"{side} of layer {layer} holds {worst}: it cannot be encoded")


def require_finite_rows(values: torch.Tensor, side: str, layer: int) -> torch.Tensor:
    """Do ``require_finite`` and return max|x| along the last axis in one pass over ``values``.

    Without its sign a float orders as its bits do, NaN above infinity, and integers have no
    slow case to heed.
    """
    integer = _BITS[values.dtype]
    bits = values.view(integer) & torch.iinfo(integer).max
    largest = bits.amax(-1, keepdim=True).view(values.dtype)
    if not float(largest.max()) <= MAX_MAGNITUDE:
        require_finite(values, side, layer)
    return largest


def scale_for(extent: torch.Tensor, levels: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the smallest scale in ``dtype`` of which ``levels`` reach ``extent`` (fp32, >= 0)."""
    scale = (extent / levels).to(dtype)
    bits = scale.view(_BITS[dtype])
    bits += scale.float() * levels < extent
    return scale


def largest_magnitude(values: torch.Tensor) -> torch.Tensor:
    """Return max|x| along the last axis of ``values`` (fp32), which stays as size 1."""
    # torch.aminmax along an axis is an order of magnitude slower.
    return torch.maximum(values.amax(-1, keepdim=True), -values.amin(-1, keepdim=True))


def divisor(scale: torch.Tensor) -> torch.Tensor:
    """Return stored scales as fp32 to divide by: 1 instead of 0 where all elements are equal."""
    return torch.where(scale == 0, torch.ones_like(scale), scale).float()


def to_pool(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return fp32 ``values`` (consumed) in the pool's dtype; the largest stay finite."""
    if dtype == torch.float16:
        values.clamp_(-65504.0, 65504.0)
    return values.to(dtype)


def encode_groups(
    values: torch.Tensor, axis: int, group: int, bits: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise ``values`` (fp32, 2 axes) asymmetrically in groups of neighbours along ``axis``.

    Returns minimum and step of each group in ``dtype`` and the codes (uint8, shape of
    ``values``). The last group holds what is left. With step s, an element errs by s/2 at most,
    apart from rounding in ``dtype``.
    """
    lows, steps, codes = [], [], []
    for part in _parts(values, axis, group):
        low, high = part.amin(axis + 1, keepdim=True), part.amax(axis + 1, keepdim=True)
        stored_low = low.to(dtype)  # exact: it is an element of the pool
        step = scale_for(high - low, 2**bits - 1, dtype)
        code = (part - low).div_(divisor(step)).round_()
        lows.append(stored_low.squeeze(axis + 1))
        steps.append(step.squeeze(axis + 1))
        codes.append(_to_uint8(code).flatten(axis, axis + 1))
    return torch.cat(lows, axis), torch.cat(steps, axis), torch.cat(codes, axis)


def decode_groups(
    low: torch.Tensor, step: torch.Tensor, codes: torch.Tensor, axis: int, group: int
) -> torch.Tensor:
    """Return fp32 values [as ``codes``] of what ``encode_groups`` returned."""
    values = codes.float()
    done = 0
    for part in _parts(values, axis, group):
        count = part.shape[axis]
        part.mul_(step.narrow(axis, done, count).unsqueeze(axis + 1).float())
        part.add_(low.narrow(axis, done, count).unsqueeze(axis + 1).float())
        done += count
    return values


def group_count(size: int, group: int) -> int:
    """Return the number of groups along an axis of ``size`` elements."""
    return -(-size // group)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return two codes < 16 per byte: byte i holds elements i (low) and i + n (high).

    n is half the number of codes, rounded up; a missing last one is 0.
    """
    flat = codes.reshape(-1)
    half = packed_size(len(flat))
    packed = flat[:half].clone()
    packed[: len(flat) - half] |= flat[half:] << 4
    return packed


def unpack_nibbles(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ``count`` codes of ``pack_nibbles``, flat."""
    return torch.cat((packed & 15, packed >> 4))[:count]


def packed_size(count: int) -> int:
    """Return the bytes of ``count`` packed codes."""
    return -(-count // 2)


def _to_uint8(codes: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.int16).to(torch.uint8)  # four times as fast as in one step


def _parts(values: torch.Tensor, axis: int, group: int) -> list[torch.Tensor]:
    """Views of the whole groups and of the rest, the axis split in (groups, elements)."""
    size = values.shape[axis]
    whole = size // group * group
    cuts = [(0, whole, group), (whole, size - whole, size - whole)]
    before, after = values.shape[:axis], values.shape[axis + 1 :]
    return [
        values.narrow(axis, start, count).view(*before, -1, width, *after)
        for start, count, width in cuts
        if count
    ]
