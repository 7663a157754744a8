"""Log probabilities of prompt tokens, chunk by chunk."""

from typing import Final

import torch

from shared.engine.batch import SequenceInput
from shared.engine.sampling.logprobs import RowLogprobs
from shared.engine.sampling.state import SequenceState
from shared.errors import NumericalError
from shared.messages.request import TokenLogprob

_ROWS_AT_ONCE: Final = 32


class PromptRows:
    """Rows of a chunk that predict prompt tokens: row of position p predicts token p + 1."""

    __slots__ = ("_targets", "_top", "key", "rows")

    def __init__(self, key: int, rows: range, targets: tuple[int, ...], top: int) -> None:
        self.key = key
        self.rows = rows
        self._targets = targets
        self._top = top

    @classmethod
    def of(
        cls, sequence: SequenceInput, state: SequenceState | None, first_row: int
    ) -> "PromptRows | None":
        """Return the rows of this chunk, or None where the request asks for no prompt logprobs."""
        if state is None or state.sampling.prompt_logprobs is None:
            return None
        end = sequence.start + len(sequence.tokens)
        targets = state.prompt_ids[sequence.start + 1 : end + 1]
        if not targets:
            return None
        rows = range(first_row, first_row + len(targets))
        return cls(sequence.key, rows, targets, state.sampling.prompt_logprobs)

    def logprobs(self, logits: torch.Tensor) -> tuple[TokenLogprob, ...]:
        """Return one entry per row of ``logits`` [rows, vocab]. Raises ``NumericalError``."""
        entries: list[TokenLogprob] = []
        for low in range(0, len(self._targets), _ROWS_AT_ONCE):
            part = logits[low : low + _ROWS_AT_ONCE].float()
            if not bool(torch.isfinite(part).all()):
                raise NumericalError("logits of the prompt hold NaN or Inf")
            targets = self._targets[low : low + _ROWS_AT_ONCE]
            for row, token in zip(part.numpy(), targets, strict=True):
                entries.append(RowLogprobs(row, self._top).of(token))
        return tuple(entries)
