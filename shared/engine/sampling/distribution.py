"""Temperature, min-p, top-k, top-p and the inverse CDF, one row of logits after the other.

Every function depends on its own row only and breaks no tie by order: filters are thresholds,
so equal logits stay or go together. The order of filters is that of vLLM.

A row of weights stays in a core's own cache from the first pass over it to the last, those of a
whole batch do not: pass by pass over the batch took longer.
"""

from collections.abc import Callable
from functools import partial
from math import log
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Row = NDArray[np.float32]
Ids = NDArray[np.int64]
Kept = tuple[Ids, Row]
"""Tokens in ascending order, and their weights."""

_SPAN: Final = 256
_LEVELS: Final = (1e-2, 1e-3, 1e-4, 1e-6, 1e-9, 0.0)
"""Relative weights down to which top-k looks for its tokens; most rows end at the first two."""
_STRIDE: Final = 128
"""One weight in so many tells top-p how much lies below a level."""
_SLACK: Final = 1e-4
"""Far above what rounding in float32 moves a logit, relative to the temperature."""
_LEAST: Final = 1e-37
"""Below this, weights lose digits."""
_LOWEST: Final = -3e38


class Filters(Struct, frozen=True):
    """What a draw goes by. ``min_p`` 0, ``top_k`` 0 and ``top_p`` 1 are off."""

    temperature: float
    min_p: float
    top_k: int
    top_p: float

    @property
    def off(self) -> bool:
        """True where every token may be drawn."""
        return self.min_p <= 0 and self.top_k <= 0 and self.top_p >= 1.0


class Chooser:
    """Draws tokens from rows of one width, in memory that is taken once."""

    def __init__(self, vocab_size: int) -> None:
        self._weights: Row = np.empty(vocab_size, dtype=np.float32)
        self._sums: NDArray[np.float64] = np.zeros(vocab_size // _SPAN + 1, dtype=np.float64)

    def choose(self, row: Row, highest: np.float32, filters: Filters, uniform: float) -> int:
        """Return a token of what the filters leave of ``row``, whose largest logit is ``highest``.

        It is the one at which the cumulative weight first exceeds ``uniform`` of the total.
        """
        if filters.off:
            weights = weights_of(row, highest, filters.temperature, self._weights)
            return _pick(weights, uniform, self._sums)
        ids, weights = self.kept(row, highest, filters)
        mass = weights.cumsum(dtype=np.float64)
        place = int(mass.searchsorted(uniform * mass[-1], side="right"))
        return int(ids[min(place, ids.size - 1)])

    def kept(self, row: Row, highest: np.float32, filters: Filters) -> Kept:
        """Return what min-p, then top-k, then top-p of the rest leave.

        Sorting a whole vocabulary takes long, so tokens are taken from the top down until they are
        sure to hold all that stay, and where they suffice only these get weights.
        """
        if filters.min_p <= 0 and filters.top_k <= 0:
            weights = weights_of(row, highest, filters.temperature, self._weights)
            (ids, found), cutoff = _head(weights, filters.top_p)
        else:
            above = partial(_above, row, highest, filters.temperature)
            (ids, found), cutoff = _best(above, filters)
        stay = found >= cutoff
        return ids.compress(stay), found.compress(stay)


def weights_of(row: Row, highest: np.float32, temperature: float, out: Row) -> Row:
    """Write ``exp((row - highest) / temperature)`` to ``out``: the best token has weight 1."""
    np.subtract(row, highest, out=out)
    if temperature != 1.0:
        np.multiply(out, np.float32(1.0 / temperature), out=out)
    np.exp(out, out=out)
    return out


def _pick(weights: Row, uniform: float, cumulative: NDArray[np.float64]) -> int:
    """Return the token at which the cumulative weight first exceeds ``uniform`` of the total.

    ``cumulative`` [spans + 1] is overwritten.
    """
    whole = weights.size // _SPAN * _SPAN
    spans = weights[:whole].reshape(-1, _SPAN)
    np.add.reduce(spans, axis=1, dtype=np.float64, out=cumulative[:-1])
    cumulative[-1] = np.add.reduce(weights[whole:], dtype=np.float64)
    np.add.accumulate(cumulative, out=cumulative)
    target = uniform * cumulative[-1]
    span = int(cumulative.searchsorted(target, side="right"))
    if span < cumulative.size:
        part = weights[span * _SPAN : (span + 1) * _SPAN]
        before = cumulative[span - 1] if span else 0.0
        offset = int((before + part.cumsum(dtype=np.float64)).searchsorted(target, "right"))
        if offset < part.size:
            return span * _SPAN + offset
        return span * _SPAN + int(np.flatnonzero(part)[-1])
    return int(np.flatnonzero(weights)[-1])


def _above(row: Row, highest: np.float32, temperature: float, level: float) -> Kept:
    """Return at least the tokens with a weight of ``level`` or more; only these get weights."""
    floor = _LOWEST
    if level >= _LEAST:
        floor = max(_LOWEST, float(highest) + temperature * (log(level) - _SLACK))
    ids = (row >= np.float32(floor - 2e-7 * abs(floor))).nonzero()[0]
    logits = row[ids]
    return ids, weights_of(logits, highest, temperature, logits)


def _best(above: Callable[[float], Kept], filters: Filters) -> tuple[Kept, np.float32]:
    """Return tokens among which are all that stay, and the least weight that does."""
    min_p, top_k, top_p = np.float32(filters.min_p), filters.top_k, filters.top_p
    if top_k <= 0:
        found = above(filters.min_p)
        if top_p >= 1.0:
            return found, min_p
        rising, least = np.sort(found[1]), min_p
    else:
        for level in _LEVELS:
            found = above(max(level, filters.min_p))
            rising = np.sort(found[1])
            # What equals the last of the k must be among them, or ties were broken.
            if rising.size >= top_k and rising[-top_k] >= np.float32(level):
                break
            if level <= filters.min_p:
                break
        least = max(min_p, rising[-top_k]) if rising.size >= top_k else min_p
    falling = rising[rising.searchsorted(least) :][::-1]
    return found, _smallest_head(falling, top_p * float(falling.sum(dtype=np.float64)))


def _head(weights: Row, top_p: float) -> tuple[Kept, np.float32]:
    """Return the same where only top-p is on."""
    total = float(weights.sum(dtype=np.float64))
    goal = top_p * total
    rest = total - goal
    few = np.sort(weights[::_STRIDE])
    below = few.cumsum(dtype=np.float64) * _STRIDE
    places = below.searchsorted((0.6 * rest, 0.2 * rest)).clip(max=few.size - 1)
    # Two guesses, then one that cannot fail: what is below has less than the rest of the mass.
    for level in (*few[places], np.float32(rest / weights.size), np.float32(0.0)):
        ids = (weights >= level).nonzero()[0]
        found = weights[ids]
        if found.sum(dtype=np.float64) >= goal:
            break
    return (ids, found), _smallest_head(np.sort(found)[::-1], goal)


def _smallest_head(best: Row, goal: float) -> np.float32:
    """Return the last of the fewest first elements of ``best`` whose sum reaches ``goal``."""
    count = int(best.cumsum(dtype=np.float64).searchsorted(goal, side="left"))
    return np.float32(best[min(count, best.size - 1)])
