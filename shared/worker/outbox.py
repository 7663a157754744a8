"""Collects what one event brings, so that the router gets one message for it."""

from shared.errors import ErrorPayload
from shared.ids import DispatchId
from shared.messages.request import FinishReason, TokenLogprob
from shared.messages.router_worker import (
    Prefilled,
    SequenceFailed,
    SequenceFinished,
    StepOutput,
    TokenOut,
)
from shared.worker.effects import Effect, ToRouter
from shared.worker.limits import Tally
from shared.worker.sequence import Sequence


class Outbox:
    """Effects and router output of the event in hand; ``take`` empties it."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._effects: list[Effect] = []
        self._tokens: list[TokenOut] = []
        self._prefilled: list[Prefilled] = []
        self._finished: list[SequenceFinished] = []
        self._failed: list[SequenceFailed] = []

    def add(self, effect: Effect) -> None:
        """Append an effect; it follows the step output of this event."""
        self._effects.append(effect)

    def token(
        self, dispatch: DispatchId, index: int, token: int, logprob: TokenLogprob | None
    ) -> None:
        """Report output token number ``index``."""
        self._tokens.append(TokenOut(dispatch, index, token, logprob))

    def prefilled(self, sequence: Sequence) -> None:
        """Report that the prompt is computed and held for its reader."""
        self._prefilled.append(
            Prefilled(
                dispatch=sequence.dispatch,
                num_cached_tokens=sequence.num_cached_tokens,
                times=sequence.times(),
                prompt_logprobs=tuple(sequence.prompt_logprobs),
            )
        )

    def finished(self, sequence: Sequence, reason: FinishReason) -> None:
        """Report the regular end."""
        self._finished.append(
            SequenceFinished(
                dispatch=sequence.dispatch,
                reason=reason,
                num_cached_tokens=sequence.num_cached_tokens,
                times=sequence.times(),
                prompt_logprobs=tuple(sequence.prompt_logprobs),
            )
        )

    def failed(self, dispatch: DispatchId, error: ErrorPayload) -> None:
        """Report that the dispatch cannot go on here."""
        self._tally.failed += 1
        self._failed.append(SequenceFailed(dispatch=dispatch, error=error))

    def take(self, step: int) -> list[Effect]:
        """Return all effects, the router's ``StepOutput`` (if any) first, and start anew."""
        effects, self._effects = self._effects, []
        if self._tokens or self._prefilled or self._finished or self._failed:
            output = StepOutput(
                step=step,
                tokens=tuple(self._tokens),
                prefilled=tuple(self._prefilled),
                finished=tuple(self._finished),
                failed=tuple(self._failed),
            )
            effects.insert(0, ToRouter(output))
            self._tokens, self._prefilled, self._finished, self._failed = [], [], [], []
        return effects
