"""What one sequence's sampling needs to remember between steps."""

from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from shared.engine.batch import OpenSequence
from shared.engine.sampling.distribution import Filters, Row
from shared.engine.sampling.grammar import GrammarCompiler
from shared.engine.sampling.penalties import SeenTokens
from shared.errors import InvalidRequest
from shared.messages.request import Sampling

if TYPE_CHECKING:
    from shared.engine.sampling.xgrammar_compiler import Matcher

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the weights of all but the best tokens vanish."""


class SequenceState:
    """Sampler state of one open sequence.

    Raises:
        InvalidRequest: a number makes no sense, a biased or stop token is not in the vocabulary,
            or the grammar is bad.
        GrammarMismatch: the tokens produced before do not follow the grammar.
    """

    def __init__(
        self, sequence: OpenSequence, vocab_size: int, grammars: GrammarCompiler | None
    ) -> None:
        sampling = sequence.sampling
        self.sampling = sampling
        self.index = len(sequence.output_ids)
        """Number of output tokens so far: the index of the next one."""
        self.greedy = sampling.temperature < GREEDY_BELOW
        self.filters = Filters(sampling.temperature, sampling.min_p, sampling.top_k, sampling.top_p)
        self.prompt_ids = sequence.prompt_ids
        _check_numbers(sampling)
        _check_ids(sampling.logit_bias, vocab_size, "logit_bias")
        _check_ids(sampling.stop_token_ids, vocab_size, "stop_token_ids")
        self._bias_ids = np.fromiter(sampling.logit_bias, dtype=np.int64)
        self._bias = np.fromiter(sampling.logit_bias.values(), dtype=np.float32)
        self._stop_ids = np.array(sampling.stop_token_ids, dtype=np.int64)
        repeats = sampling.repetition_penalty != 1.0
        self._seen: SeenTokens | None = None
        if repeats or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0:
            prompt = sequence.prompt_ids if repeats else ()
            self._seen = SeenTokens(prompt, sequence.output_ids)
        self._matcher: Matcher | None = None
        if sampling.grammar is not None:
            if grammars is None:
                raise InvalidRequest("grammars are not available here", param="response_format")
            self._matcher = grammars.matcher(sampling.grammar, sequence.output_ids)

    @property
    def edits(self) -> bool:
        """True where the next row of logits is changed before sampling."""
        return (
            self._seen is not None
            or self._matcher is not None
            or self._bias.size > 0
            or self._must_go_on
        )

    @property
    def _must_go_on(self) -> bool:
        return self.index < self.sampling.min_tokens and self._stop_ids.size > 0

    def edited(self, row: Row, out: Row) -> Row:
        """Write ``row`` with penalties, bias, grammar and minimum length to ``out``; return it.

        Where grammar and minimum length leave no token, the grammar wins.
        """
        np.copyto(out, row)
        row = out
        if self._seen is not None:
            sampling = self.sampling
            self._seen.penalise(
                row,
                sampling.repetition_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
        if self._bias.size > 0:
            row[self._bias_ids] += self._bias
        if self._matcher is not None:
            self._matcher.forbid(row)
        if self._must_go_on:
            kept = row[self._stop_ids]
            row[self._stop_ids] = -np.inf
            if row.max() == -np.inf:
                row[self._stop_ids] = kept
        return row

    def accept(self, token: int) -> None:
        """Advance by the sampled ``token``. Raises ``GrammarMismatch``."""
        if self._matcher is not None:
            self._matcher.accept(token)
        if self._seen is not None:
            self._seen.add(token)
        self.index += 1


def _check_numbers(sampling: Sampling) -> None:
    """Refuse what would fail in the middle of a step, and with it everybody else's."""
    numbers = (
        *(sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty),
        *(sampling.presence_penalty, sampling.frequency_penalty, *sampling.logit_bias.values()),
    )
    if not all(isfinite(number) for number in numbers):
        raise InvalidRequest("a sampling parameter is not a finite number")
    if sampling.min_p > 1 or sampling.repetition_penalty <= 0:
        raise InvalidRequest("min_p is above 1 or repetition_penalty not above 0")


def _check_ids(ids: object, vocab_size: int, param: str) -> None:
    assert isinstance(ids, (dict, tuple))
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    if wrong:
        raise InvalidRequest(
            f"token {wrong[0]} in {param} is not in the vocabulary of {vocab_size}", param=param
        )
