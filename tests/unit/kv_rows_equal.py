"""Rows of KV pools compared."""

import torch

from shared.kernels.kv_rows import from_rows, head_dim


def same_rows(rows: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal, NaN included; integers may be one apart, as a fused product rounds ties otherwise."""
    if rows.dtype != torch.int8:
        return torch.equal(rows.nan_to_num(77), expected.nan_to_num(77))
    dim = head_dim(rows)
    near = (rows[..., :dim].int() - expected[..., :dim].int()).abs() <= 1
    ours, theirs = (from_rows(_units(x)) for x in (rows, expected))
    return torch.equal(ours.nan_to_num(77), theirs.nan_to_num(77)) and bool(
        (near | theirs.isnan()).all()
    )


def _units(rows: torch.Tensor) -> torch.Tensor:
    """Rows of ones with the scales of ``rows``: their floats are those scales."""
    ones = torch.ones_like(rows)
    ones[..., head_dim(rows) :] = rows[..., head_dim(rows) :]
    return ones
