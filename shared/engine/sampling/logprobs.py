"""Log probabilities of raw logits: before temperature, penalties, bias, masks and grammar."""

import numpy as np
from numpy.typing import NDArray

from shared.engine.sampling.distribution import Row
from shared.messages.request import TokenLogprob


class RowLogprobs:
    """Log-softmax of one row; the best ``k`` are ordered by logit, then by token id."""

    def __init__(self, row: Row, k: int) -> None:
        highest = row.max()
        total = np.exp(row - highest).sum(dtype=np.float64)
        self._row = row
        self._norm = float(highest) + float(np.log(total))
        self._top = tuple((int(t), float(row[t]) - self._norm) for t in _best(row, k))

    def of(self, token: int) -> TokenLogprob:
        """Return the log probability of ``token`` together with the best ones."""
        return TokenLogprob(logprob=float(self._row[token]) - self._norm, top=self._top)


def _best(row: Row, k: int) -> NDArray[np.int64]:
    if k <= 0:
        return np.empty(0, dtype=np.int64)
    k = min(k, row.size)
    bound = np.partition(row, row.size - k)[row.size - k]
    candidates = np.flatnonzero(row >= bound)
    order = np.argsort(-row[candidates], kind="stable")
    best: NDArray[np.int64] = candidates[order[:k]]
    return best
