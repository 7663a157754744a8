"""What is kept of one request, and what an event stream means."""

import msgspec
from msgspec import Struct


class Phases(Struct, frozen=True, kw_only=True):
    """Seconds that add up to the gateway's time to first token."""

    queue: float
    prefill: float
    transfer: float
    first_step: float = 0.0


class SecondToken(Struct, frozen=True, kw_only=True):
    """Seconds from the first token sampled to KV verified, and on to decode's own token."""

    transfer: float
    first_step: float


class _Times(Struct, frozen=True):
    stepped: float | None = None
    finished: float | None = None


class _Moments(Struct, frozen=True):
    decode: _Times | None = None


class Timeline(Struct, frozen=True, kw_only=True):
    """The parts of the answer to ``"timeline": true`` that the report uses."""

    phases: Phases | None = None
    second_token: SecondToken | None = None
    split: bool = False
    reason: str = ""
    retries: int = 0
    moments: _Moments | None = None

    def decode_step(self, tokens: int) -> float | None:
        """Return the mean decode step in seconds: decode's own tokens follow token 1."""
        times = self.moments.decode if self.moments is not None else None
        if times is None or times.stepped is None or times.finished is None or tokens < 3:
            return None
        return (times.finished - times.stepped) / (tokens - 2)


class Record(Struct, frozen=True, kw_only=True):
    """One request as its client saw it; moments in ``time.monotonic()`` seconds."""

    sent: float
    events: tuple[float, ...]
    ended: float
    prompt_tokens: int
    output_tokens: int
    timeline: Timeline | None
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.events[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first, None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.events[-1] - self.events[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between events that carried text."""
        return [b - a for a, b in zip(self.events, self.events[1:], strict=False)]


class _Choice(Struct, frozen=True):
    text: str = ""
    finish_reason: str | None = None
    timeline: Timeline | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class _Problem(Struct, frozen=True):
    message: str = ""


class _Event(Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Problem | None = None


class Recorder:
    """Collects the events of one streamed completion; ``feed`` is the only hot part."""

    def __init__(self, sent: float) -> None:
        self._sent = sent
        self._decode = msgspec.json.Decoder(_Event).decode
        self._events: list[float] = []
        self._usage: _Usage | None = None
        self._timeline: Timeline | None = None
        self._finished = False
        self._error: str | None = None

    def feed(self, data: bytes, at: float) -> None:
        """Take one event's data that arrived at ``at``."""
        if data == b"[DONE]":
            return
        try:
            event = self._decode(data)
        except msgspec.MsgspecError as error:
            self._error = f"unreadable event: {error}"
            return
        if event.error is not None:
            self._error = event.error.message
        self._usage = event.usage or self._usage
        for choice in event.choices:
            if choice.text:
                self._events.append(at)
            self._timeline = choice.timeline or self._timeline
            self._finished = self._finished or choice.finish_reason is not None

    def close(self, ended: float, error: str | None) -> Record:
        """Return the record; whatever is not complete is an error."""
        problem = error or self._error
        if problem is None and not (self._finished and self._events and self._usage):
            problem = "the stream ended without text, finish reason or usage"
        usage = self._usage or _Usage(0, 0)
        return Record(
            sent=self._sent,
            events=tuple(self._events),
            ended=ended,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            timeline=self._timeline,
            error=problem,
        )
