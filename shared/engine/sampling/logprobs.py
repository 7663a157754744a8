"""Log probabilities of raw logits: before temperature, penalties, bias, masks and grammar."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shared.engine.sampling.distribution import Row
from shared.messages.request import TokenLogprob

_DISTANCES: Final = (4.0, 8.0, 16.0, np.inf)
"""Logits below the best within which the next best are looked for."""


class RowLogprobs:
    """Log-softmax of one row; the best ``k`` are ordered by logit, then by token id."""

    def __init__(self, row: Row, k: int, scratch: Row | None = None) -> None:
        """Sum up ``row``; ``scratch`` of the same size spares taking memory for it."""
        highest = row.max()
        weights = np.subtract(row, highest, out=scratch)
        total = np.exp(weights, out=weights).sum(dtype=np.float64)
        self._row = row
        self._norm = float(highest) + float(np.log(total))
        self._top = tuple(
            (int(t), float(row[t]) - self._norm) for t in _best(row, k, float(highest))
        )

    def of(self, token: int) -> TokenLogprob:
        """Return the log probability of ``token`` together with the best ones."""
        return TokenLogprob(logprob=float(self._row[token]) - self._norm, top=self._top)


def _best(row: Row, k: int, highest: float) -> NDArray[np.int64]:
    """Return the ``k`` best tokens; only those near the top are sorted."""
    if k <= 0:
        return np.empty(0, dtype=np.int64)
    k = min(k, row.size)
    for distance in _DISTANCES:
        candidates = np.flatnonzero(row >= highest - distance)
        if candidates.size >= k:
            break
    order = (-row[candidates]).argsort(kind="stable")
    best: NDArray[np.int64] = candidates[order[:k]]
    return best
