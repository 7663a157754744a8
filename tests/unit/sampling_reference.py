"""The plain way to draw from one row, with weights for every token: what a seed means.

``shared.engine.sampling.distribution`` takes shorter ways to the same tokens.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]

_SPAN: Final = 256
_PROBES: Final = (1e-2, 1e-3, 1e-4, 1e-6, 1e-9, 0.0)
"""Relative weights down to which candidates are looked for; most rows end at the first two."""


def weights_of(row: Row, temperature: float, out: Row) -> Row:
    """Write ``exp((row - max) / temperature)`` to ``out``: the best token has weight 1."""
    np.subtract(row, row.max(), out=out)
    np.multiply(out, np.float32(1.0 / temperature), out=out)
    np.exp(out, out=out)
    return out


def draw(weights: Row, min_p: float, top_k: int, top_p: float, uniform: float) -> int:
    """Return a token out of what min-p, then top-k (0 is off), then top-p of the rest leave."""
    bound = cutoff(weights, min_p, top_k, top_p)
    if bound <= 0:
        return pick(weights, uniform)
    kept = np.flatnonzero(weights >= bound)
    mass = np.cumsum(weights[kept], dtype=np.float64)
    place = int(np.searchsorted(mass, uniform * mass[-1], side="right"))
    return int(kept[min(place, kept.size - 1)])


def cutoff(weights: Row, min_p: float, top_k: int, top_p: float) -> np.float32:
    """Return the smallest weight that stays.

    Sorting a whole vocabulary costs milliseconds, so candidates are taken from the top down
    until they are sure to hold the answer.
    """
    if top_k <= 0 and top_p >= 1.0:
        return np.float32(min_p)
    whole = top_k <= 0 and min_p <= 0
    goal = top_p * float(weights.sum(dtype=np.float64)) if whole else 0.0
    for probe in _PROBES:
        candidates = weights[weights >= np.float32(max(probe, min_p))]
        if probe <= min_p or candidates.size >= top_k > 0:
            return _cutoff_among(candidates, top_k, top_p)
        if whole and candidates.sum(dtype=np.float64) >= goal:
            return _smallest_head(np.sort(candidates)[::-1], goal)
    raise AssertionError("the last probe holds every candidate")


def _cutoff_among(candidates: Row, top_k: int, top_p: float) -> np.float32:
    """Return the cutoff where all that top-k may keep is among ``candidates``."""
    if 0 < top_k < candidates.size:
        worst = candidates.size - top_k
        candidates = candidates[candidates >= np.partition(candidates, worst)[worst]]
    best = np.sort(candidates)[::-1]
    return _smallest_head(best, top_p * float(best.sum(dtype=np.float64)))


def _smallest_head(best: Row, goal: float) -> np.float32:
    """Return the last of the fewest first elements of ``best`` whose sum reaches ``goal``."""
    count = int(np.searchsorted(np.cumsum(best, dtype=np.float64), goal, side="left"))
    return np.float32(best[min(count, best.size - 1)])


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
