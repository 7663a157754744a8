"""Repetition, frequency and presence penalties over the tokens a sequence has seen."""

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shared.engine.sampling.distribution import Row

_LARGEST: Final = np.float32(1e30)
"""Far above every logit, with room for what is added afterwards."""


class SeenTokens:
    """Distinct tokens of prompt and output with their count in the output; grows by doubling.

    Prompt tokens matter to the repetition penalty only (as in transformers and vLLM); OpenAI's
    frequency and presence penalties count the output.
    """

    def __init__(self, prompt_ids: Iterable[int], output_ids: Iterable[int]) -> None:
        self._slots: dict[int, int] = {}
        self._ids: NDArray[np.int64] = np.empty(64, dtype=np.int64)
        self._counts: NDArray[np.float32] = np.zeros(64, dtype=np.float32)
        for token in prompt_ids:
            self._slot(token)
        for token in output_ids:
            self.add(token)

    def add(self, token: int) -> None:
        """Count one output token."""
        slot = self._slot(token)  # may replace the arrays
        self._counts[slot] += 1

    def penalise(self, row: Row, repetition: float, frequency: float, presence: float) -> None:
        """Change ``row`` in place: repetition first, then frequency and presence.

        What a tiny repetition penalty makes of a logit may exceed float32: the largest stays.
        """
        size = len(self._slots)
        ids, counts = self._ids[:size], self._counts[:size]
        values = row[ids]
        if repetition != 1.0:
            with np.errstate(over="ignore", divide="ignore"):
                values = np.where(values > 0, values / repetition, values * repetition)
            values = np.clip(values, -_LARGEST, _LARGEST)
        values -= frequency * counts + presence * (counts > 0)
        row[ids] = values

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == self._ids.size:
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[slot] = token
        return slot
