"""Sampling of a batch of logit rows, one per sequence."""

from collections.abc import Iterable, Sequence
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from shared.engine.batch import OpenSequence, Sampled
from shared.engine.sampling.distribution import Chooser, Row
from shared.engine.sampling.grammar import GrammarCompiler
from shared.engine.sampling.logprobs import RowLogprobs
from shared.engine.sampling.philox import uniforms
from shared.engine.sampling.state import SequenceState
from shared.errors import DiptychError, ErrorPayload, InvalidRequest, NumericalError

Rows = NDArray[np.float32]
Failure = tuple[int, ErrorPayload]


class _Unsampleable(InvalidRequest):
    """No token is left to choose from: only a grammar without an end can bring that about."""


class Sampler:
    """Sampler states of the open sequences, by key."""

    def __init__(self, vocab_size: int, grammars: GrammarCompiler | None) -> None:
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._states: dict[int, SequenceState] = {}
        self._chooser = Chooser(vocab_size)
        self._spare: Row = np.empty(vocab_size, dtype=np.float32)

    def __len__(self) -> int:
        return len(self._states)

    def open(self, sequence: OpenSequence) -> None:
        """Start a sequence's state. Raises ``InvalidRequest`` or ``GrammarMismatch``."""
        self._states.pop(sequence.key, None)
        self._states[sequence.key] = SequenceState(sequence, self._vocab_size, self._grammars)

    def close(self, keys: Iterable[int]) -> None:
        """Forget sequences; unknown keys are those that failed before."""
        for key in keys:
            self._states.pop(key, None)

    def get(self, key: int) -> SequenceState | None:
        """Return the state of an open sequence."""
        return self._states.get(key)

    def sample(
        self, keys: Sequence[int], logits: Rows, best: Sequence[int] | None = None
    ) -> tuple[list[Sampled], list[Failure]]:
        """Choose and accept one token per row of ``logits`` [len(keys), vocab].

        ``best`` are the first of each row's best tokens, -1 where a logit is not finite, if known.
        All keys must be open. A row that fails takes its own sequence with it, no other.
        """
        if not keys:
            return [], []
        states = [self._states[key] for key in keys]
        numbers = _numbers({i: state for i, state in enumerate(states) if not state.greedy})
        sampled: list[Sampled] = []
        failed: list[Failure] = []
        for i, (key, state) in enumerate(zip(keys, states, strict=True)):
            try:
                highest = _best(logits[i]) if best is None else best[i]
                sampled.append(self._one(key, state, logits[i], highest, numbers.get(i)))
            except DiptychError as error:
                failed.append((key, error.payload()))
                del self._states[key]
        return sampled, failed

    def _one(
        self, key: int, state: SequenceState, row: Row, best: int, number: float | None
    ) -> Sampled:
        # All passes over a row follow one another: it stays in the core's cache.
        sampling = state.sampling
        token = best
        if best < 0:
            raise NumericalError(f"logits of output token {state.index} hold NaN or Inf")
        if number is not None or state.edits:
            token = self._choose(state, row, best, number)
        logprob = None
        if sampling.logprobs is not None:
            logprob = RowLogprobs(row, sampling.logprobs, self._spare).of(token)
        state.accept(token)
        return Sampled(key=key, token=token, logprob=logprob)

    def _choose(self, state: SequenceState, row: Row, greedy: int, number: float | None) -> int:
        if state.edits:
            row = state.edited(row, self._spare)
            greedy = int(row.argmax())
            if not np.isfinite(row[greedy]):
                raise _Unsampleable(
                    f"the schema allows nothing after {state.index} tokens of output",
                    param="response_format",
                )
        if number is None:
            return greedy
        return self._chooser.choose(row, row[greedy], state.filters, number)


def _best(row: Row) -> int:
    """Return the first of the best tokens; -1 where a logit is not finite."""
    best = int(row.argmax())  # the place of a NaN where there is one
    return best if isfinite(row[best]) and isfinite(row.min()) else -1


def _numbers(drawn: dict[int, SequenceState]) -> dict[int, float]:
    """Return each state's next random number."""
    if not drawn:
        return {}
    seeds = [state.sampling.seed for state in drawn.values()]
    found = uniforms(seeds, [state.index for state in drawn.values()])
    return dict(zip(drawn, found.tolist(), strict=True))
