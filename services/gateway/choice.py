"""One output of a call: tokens come in, text and log probabilities wait to be taken."""

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from services.gateway.events import Finished
from services.gateway.metrics import Metrics
from services.gateway.output_text import OutputText
from services.gateway.timeline import Moments, Timeline, make_timeline
from shared.ids import RequestId
from shared.messages.gateway_router import TokenItem
from shared.messages.request import FinishReason, TokenLogprob


class Piece(Struct):
    """New output. ``offsets``: characters of output before each token; with logprobs only."""

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob | None]
    offsets: list[int]


class Stopper(Protocol):
    """Ends a request whose stop string was found."""

    def stop(self, request_id: RequestId) -> None: ...


class Shared(Struct):
    """What the outputs of one call have in common.

    ``arrival`` is monotonic; ``scored``: log probabilities are wanted; ``eager``: tokens
    count as a change even when they bring no text yet. ``endpoint`` labels metrics.
    """

    endpoint: str
    arrival: float
    scored: bool
    eager: bool
    stopper: Stopper
    metrics: Metrics
    on_change: "Callable[[Choice], None]"


class Choice:
    """Listener of one request; says ``on_change`` when there is something to take."""

    def __init__(
        self,
        shared: Shared,
        request_id: RequestId,
        index: int,
        prompt_ids: tuple[int, ...],
        output: OutputText,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.prompt_ids = prompt_ids
        self.output = output
        self.moments = Moments(arrival=shared.arrival)
        self.end: Finished | None = None
        self.prompt_logprobs: tuple[TokenLogprob, ...] | None = None
        self.tail = ""
        self._shared = shared
        self._scored = shared.scored
        self._eager = shared.eager or shared.scored
        self._metrics = shared.metrics
        self._on_change = shared.on_change
        self._piece = Piece("", [], [], [])

    @property
    def num_tokens(self) -> int:
        """Output tokens that count: up to the one that completed a stop string."""
        return self.output.num_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the output ended, None while it has not or when it failed."""
        if self.end is None or self.end.error is not None:
            return None
        return "stop" if self.output.stopped else self.end.reason

    def take(self) -> Piece:
        """Return what came since the last call, what was held back to the end included."""
        piece = self.take_piece()
        piece.text += self.tail
        self.tail = ""
        return piece

    def take_piece(self) -> Piece:
        """Return what came with tokens since the last call; ``tail`` is what remains."""
        piece, self._piece = self._piece, Piece("", [], [], [])
        return piece

    def take_text(self) -> str:
        """Return the text that came with tokens since the last call and drop their ids."""
        piece = self._piece
        text, piece.text = piece.text, ""
        piece.tokens.clear()
        return text

    def timeline(self) -> Timeline:
        """Return where the time went; complete once the request has ended."""
        return make_timeline(self.moments, self.end.timeline if self.end else None)

    def on_tokens(self, items: list[TokenItem], now: float) -> None:
        output, piece = self.output, self._piece
        if output.stopped:
            return
        self._clock_in(now)
        text = ""
        for item in items:
            if self._scored:
                piece.offsets.append(output.offset)
                piece.logprobs.append(item.logprob)
            piece.tokens.append(item.token)
            text += output.push(item.token)
            if output.stopped:
                self._shared.stopper.stop(self.request_id)
                break
        if text:
            piece.text += text
        if text or self._eager:
            self._on_change(self)

    def on_prompt_logprobs(self, items: tuple[TokenLogprob, ...]) -> None:
        self.prompt_logprobs = items
        self._on_change(self)

    def on_end(self, done: Finished, now: float) -> None:
        self.end = done
        self.tail = self.output.finish()
        self._measure(now)
        self._on_change(self)

    def _clock_in(self, now: float) -> None:
        moments, metrics = self.moments, self._metrics
        if moments.last_token is None:
            moments.first_token = now
            metrics.ttft.observe(now - moments.arrival)
        else:
            metrics.itl.observe(now - moments.last_token)
        moments.last_token = now

    def _measure(self, now: float) -> None:
        moments, metrics = self.moments, self._metrics
        assert self.end is not None
        outcome = self.end.error.code if self.end.error is not None else "finished"
        metrics.requests.labels(self._shared.endpoint, outcome).inc()
        metrics.e2e.observe(now - moments.arrival)
        metrics.prompt_tokens.inc(len(self.prompt_ids))
        metrics.cached_tokens.inc(self.end.num_cached_tokens)
        metrics.output_tokens.inc(self.num_tokens)
        first, last = moments.first_token, moments.last_token
        if first is not None and last is not None and self.num_tokens > 1:
            metrics.tpot.observe((last - first) / (self.num_tokens - 1))
        if self.end.error is None:
            metrics.observe_timeline(self.timeline())
