"""Rows of activations to e4m3, each with a scale that depends on it alone."""

from typing import NamedTuple

import triton
import triton.language as tl

from shared.kernels.gpu.scaled import scale_for


class Rows(NamedTuple):
    """Compile-time constants: elements of a row, and how many are worked on at a time."""

    width: int
    span: int


@triton.jit(do_not_specialize=["stride"])
def quantise_row(tensors: tl.tuple, stride: tl.tensor, rows: tl.constexpr) -> None:
    """Quantise one row; the others are ``shared.kernels.fp8.quantise_rows``'s results."""
    x, whole, scales = tensors
    index = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, rows.span)
    peaks = tl.zeros((rows.span,), tl.float32)
    for begin in range(0, rows.width, rows.span):
        mask = begin + column < rows.width
        part = tl.load(x + index * stride + begin + column, mask=mask, other=0.0)
        peaks = tl.maximum(peaks, tl.abs(part.to(tl.float32)))
    scale = scale_for(tl.max(peaks, 0))
    for begin in range(0, rows.width, rows.span):
        mask = begin + column < rows.width
        part = tl.load(x + index * stride + begin + column, mask=mask, other=0.0).to(tl.float32)
        eighth = tl.math.div_rn(part, tl.zeros_like(part) + scale)
        target = whole + index * rows.width + begin + column
        tl.store(target, eighth.to(whole.dtype.element_ty), mask=mask)
    tl.store(scales + index, scale)
