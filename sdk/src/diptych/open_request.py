"""One request that has not ended: what it has received and how to submit the rest of it."""

from dataclasses import dataclass, field

from msgspec import Struct, structs

from diptych.wire import (
    Accepted,
    DeltaItem,
    Ended,
    FinishReason,
    Logprob,
    Submit,
    Timeline,
    Usage,
    WireError,
)


class Started(Struct, frozen=True):
    """The gateway took the request; told once, also when it is resumed later."""

    seed: int
    prompt_tokens: int


class Output(Struct, frozen=True):
    """New output; ``index`` is the position of ``tokens[0]`` in the whole output."""

    index: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[Logprob, ...] | None


class PromptScores(Struct, frozen=True):
    """Log probabilities of prompt tokens 1..n-1."""

    items: tuple[Logprob, ...]


class Finished(Struct, frozen=True):
    """The last word on a request that completed; ``resumes`` counts its re-submissions."""

    reason: FinishReason
    text: str
    usage: Usage
    timeline: Timeline | None
    resumes: int


class Failed(Struct, frozen=True):
    """The last word on a call that did not complete."""

    error: WireError


@dataclass(eq=False)
class OpenRequest:
    """Progress of one request across sessions.

    ``attempt`` is the wire id of the current submission, None while there is no session.
    ``stalls`` counts submissions since the last new token.
    """

    key: int
    submit: Submit
    opened: float
    deadline: float
    attempt: int | None = None
    attempts: int = 0
    stalls: int = 0
    accepted: bool = False
    seed: int | None = None
    model: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    scored: bool = False
    tokens: list[int] = field(default_factory=list)
    text_end: int = 0

    def submission(self, attempt: int, now: float) -> Submit:
        """Return the next ``Submit``: the whole request, or what is left of it."""
        self.attempt = attempt
        self.attempts += 1
        self.stalls += 1
        self.accepted = False
        out = structs.replace(
            self.submit,
            id=attempt,
            received=tuple(self.tokens),
            timeout=max(self.deadline - now, 0.001),
        )
        if self.seed is not None:
            scores = None if self.scored else out.params.prompt_logprobs
            params = structs.replace(out.params, seed=self.seed, prompt_logprobs=scores)
            out = structs.replace(out, params=params)
        if self.prompt_ids is not None:
            out = structs.replace(out, prompt=None, messages=None, token_ids=self.prompt_ids)
        return out

    def accept(self, message: Accepted, model: str) -> Started | None:
        """Note what makes a later submission the same stream."""
        self.accepted = True
        first = self.seed is None
        self.seed, self.model = message.seed, model
        if message.prompt_ids is not None:
            self.prompt_ids = message.prompt_ids
        return Started(message.seed, message.prompt_tokens) if first else None

    def has_gap(self, index: int, text_at: int) -> bool:
        """Tell whether output starting there would leave something out."""
        return not self.accepted or index > len(self.tokens) or text_at > self.text_end

    def add(self, item: DeltaItem) -> Output | None:
        """Return the part of a gapless item that is new."""
        at = len(self.tokens)
        skip = at - item.index
        tokens = item.tokens[skip:]
        text = self._new_text(item.text_at, item.text)
        if not tokens and not text:
            return None
        if tokens:
            self.stalls = 0
        self.tokens += tokens
        logprobs = None if item.logprobs is None else item.logprobs[skip:]
        return Output(at, tokens, text, logprobs)

    def finish(self, message: Ended, reason: FinishReason) -> Finished:
        """Return the end of a gapless request."""
        text = self._new_text(message.text_at, message.text)
        return Finished(reason, text, message.usage, message.timeline, self.attempts - 1)

    def _new_text(self, text_at: int, text: str) -> str:
        new = text[self.text_end - text_at :]
        self.text_end += len(new)
        return new
