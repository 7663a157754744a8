"""Temperature, min-p, top-k, top-p and the inverse CDF, on one row of logits.

Every function depends on its own row only and breaks no tie by order: filters are thresholds,
so equal logits stay or go together. The order of filters is that of vLLM.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]

_SPAN: Final = 256
_PROBES: Final = (1e-3, 1e-6, 0.0)
"""Relative weights down to which candidates are looked for; most rows end at the first."""


def weights_of(row: Row, temperature: float, out: Row) -> Row:
    """Write ``exp((row - max) / temperature)`` to ``out``: the best token has weight 1."""
    np.subtract(row, row.max(), out=out)
    np.multiply(out, np.float32(1.0 / temperature), out=out)
    np.exp(out, out=out)
    return out


def restrict(weights: Row, min_p: float, top_k: int, top_p: float) -> None:
    """Zero, in place, the weights outside min-p, then top-k (0 is off), then top-p of the rest."""
    bound = np.float32(min_p)
    if top_k > 0 or top_p < 1.0:
        bound = _cutoff(weights, min_p, top_k, top_p)
    if bound > 0:
        np.multiply(weights, weights >= bound, out=weights)


def _cutoff(weights: Row, min_p: float, top_k: int, top_p: float) -> np.float32:
    """Return the smallest weight that stays.

    Sorting a whole vocabulary costs milliseconds, so candidates are taken from the top down
    until they are sure to hold the answer.
    """
    for probe in _PROBES:
        bound = np.float32(max(probe, min_p))
        best = np.sort(weights[weights >= bound])[::-1]
        complete = probe <= min_p
        if top_k > 0:
            if best.size >= top_k:
                best = best[: int(np.searchsorted(-best, -best[top_k - 1], side="right"))]
                complete = True
            elif not complete:
                continue
        if top_p >= 1.0:
            return np.float32(best[-1])
        mass = np.cumsum(best, dtype=np.float64)
        total = mass[-1] if complete else weights.sum(dtype=np.float64)
        if complete or mass[-1] >= top_p * total:
            last = int(np.searchsorted(mass, top_p * total, side="left"))
            return np.float32(best[min(last, best.size - 1)])
    raise AssertionError("the last probe holds every candidate")


def pick(weights: Row, uniform: float) -> int:
    """Return the token at which the cumulative weight first exceeds ``uniform`` of the total."""
    whole = weights.size // _SPAN * _SPAN
    sums = weights[:whole].reshape(-1, _SPAN).sum(axis=1, dtype=np.float64)
    tail = weights[whole:].sum(dtype=np.float64)
    cumulative = np.cumsum(np.append(sums, tail))
    target = uniform * cumulative[-1]
    span = int(np.searchsorted(cumulative, target, side="right"))
    if span < cumulative.size:
        part = weights[span * _SPAN : (span + 1) * _SPAN]
        before = cumulative[span - 1] if span else 0.0
        offset = int(np.searchsorted(before + np.cumsum(part, dtype=np.float64), target, "right"))
        if offset < part.size:
            return span * _SPAN + offset
        return span * _SPAN + int(np.flatnonzero(part)[-1])
    return int(np.flatnonzero(weights)[-1])
