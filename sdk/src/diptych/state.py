"""The client as a pure machine: ``ClientState.handle(event, now) -> effects``.

It knows no socket, thread or clock. A call is known by its ``key``; the machine answers each
with updates, the last of which is ``Finished``, ``Failed``, ``Ready`` or ``Fleet``, exactly
once. ``now`` is in seconds on a steady scale.
"""

import math
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from diptych.events import (
    Abort,
    Ask,
    Dial,
    Effect,
    Emit,
    Event,
    Fleet,
    HangUp,
    Leave,
    LinkDown,
    LinkTrouble,
    LinkUp,
    Open,
    Oversized,
    Ready,
    Received,
    Send,
    Tick,
)
from diptych.open_request import Failed, Finished, OpenRequest, PromptScores
from diptych.wire import (
    PEER_TIMEOUT,
    PING_INTERVAL,
    WIRE_VERSION,
    Accepted,
    Bye,
    Cancel,
    ClientHello,
    Delta,
    Ended,
    Goodbye,
    Ping,
    Pong,
    PromptLogprobs,
    Refused,
    StatusQuery,
    StatusReply,
    ToClient,
    Welcome,
    WireError,
)

Phase = Literal["waiting", "dialing", "greeting", "open", "left"]


class ClientLimits(Struct, frozen=True, kw_only=True):
    """Seconds and counts that bound every wait and table of a client.

    ``connect_timeout`` bounds the wait for a session of a call that the gateway has not yet
    accepted, ``reconnect_timeout`` of one it has. ``max_stalls`` is the number of submissions
    without a new token after which a request is given up.
    """

    connect_timeout: float = 10.0
    reconnect_timeout: float = 60.0
    max_open: int = 1024
    max_stalls: int = 8
    first_backoff: float = 0.05
    last_backoff: float = 2.0


class ClientState:
    """Connection, open requests and pending questions of one client."""

    def __init__(
        self, incarnation: int, endpoint: str, api_key: str | None, limits: ClientLimits
    ) -> None:
        self.phase: Phase = "waiting"
        self.session = 0
        self.requests: dict[int, OpenRequest] = {}
        self.asks: dict[int, tuple[Ask, float]] = {}
        self.late = 0
        self._incarnation = incarnation
        self._endpoint = endpoint
        self._api_key = api_key
        self._limits = limits
        self._attempts: dict[int, OpenRequest] = {}
        self._last_attempt = 0
        self._welcome: Welcome | None = None
        self._redial_at = -math.inf
        self._backoff = limits.first_backoff
        self._down_since = -math.inf
        self._heard = -math.inf
        self._ping_at = math.inf
        self._trouble = "no connection"

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Advance by one event and return what is to be done, in order."""
        return list(self._handle(event, now))

    def wake_at(self) -> float:
        """Return when the next ``Tick`` is due; infinite when only events can change anything."""
        times = [self._patience_end(r) for r in self.requests.values()]
        times += [self._ask_end(ask, asked) for ask, asked in self.asks.values()]
        if self.phase == "waiting":
            times.append(self._redial_at)
        if self.phase in ("greeting", "open"):
            times += [self._heard + PEER_TIMEOUT, self._ping_at]
        return min(times, default=math.inf)

    def check(self) -> None:
        """Recompute what must hold between events; raises ``AssertionError``."""
        for attempt, request in self._attempts.items():
            assert request.attempt == attempt, "attempt table disagrees with the request"
            assert self.requests.get(request.key) is request, "attempt of a request that ended"
        submitted = [r for r in self.requests.values() if r.attempt is not None]
        assert len(submitted) == len(self._attempts), "a submission is not in the table"
        if self.phase != "open":
            assert not self._attempts, "a submission without a session"
        else:
            assert len(submitted) == len(self.requests), "a request waits in an open session"
        assert len(self.requests) + len(self.asks) <= self._limits.max_open, "table over its bound"

    def _handle(self, event: Event, now: float) -> Iterator[Effect]:
        match event:
            case Open():
                yield from self._start(event, now)
            case Ask():
                yield from self._ask(event, now)
            case Abort():
                yield from self._abort(event.key)
            case Tick():
                yield from self._tick(now)
            case Leave():
                yield from self._leave()
            case Oversized():
                yield from self._oversized(event)
            case _ if event.session != self.session or self.phase in ("waiting", "left"):
                self.late += 1
            case LinkTrouble():
                self._trouble = event.why
            case LinkUp():
                self.phase, self._heard, self._ping_at = "greeting", now, math.inf
                hello = ClientHello(
                    wire_version=WIRE_VERSION,
                    incarnation=self._incarnation,
                    session=self.session,
                    api_key=self._api_key,
                )
                yield Send(hello)
            case LinkDown():
                yield from self._lose_link(event.why, now)
            case Received():
                self._heard = now
                yield from self._receive(event.message, now)

    def _receive(self, message: ToClient, now: float) -> Iterator[Effect]:
        match message:
            case Welcome():
                yield from self._welcomed(message, now)
            case Refused():
                yield from self._refused(message.error, now)
            case Goodbye():
                yield from self._lose_link("the gateway is restarting", now)
            case Pong():
                if self.phase == "open" and message.session != self.session:
                    yield from self._lose_link("the gateway forgot this session", now)
            case StatusReply():
                yield from self._status(message)
            case Delta():
                for item in message.items:
                    request = self._attempts.get(item.id)
                    if request is None:
                        self.late += 1
                    elif request.has_gap(item.index, item.text_at):
                        yield from self._resubmit(request, now)
                    elif (output := request.add(item)) is not None:
                        yield Emit(request.key, output)
            case Accepted() | PromptLogprobs() | Ended():
                request = self._attempts.get(message.id)
                if request is None:
                    self.late += 1
                else:
                    yield from self._progress(request, message, now)

    def _progress(
        self, request: OpenRequest, message: Accepted | PromptLogprobs | Ended, now: float
    ) -> Iterator[Effect]:
        match message:
            case Accepted():
                assert self._welcome is not None
                started = request.accept(message, self._welcome.model)
                if started is not None:
                    yield Emit(request.key, started)
            case PromptLogprobs():
                if not request.scored:
                    request.scored = True
                    yield Emit(request.key, PromptScores(message.items))
            case Ended(error=WireError() as error):
                yield from self._close(request, Failed(error))
            case Ended(reason=None):
                error = WireError(code="cancelled", message="the gateway cancelled the request")
                yield from self._close(request, Failed(error))
            case Ended(reason=str() as reason):
                if request.has_gap(message.num_tokens, message.text_at):
                    yield from self._resubmit(request, now, send_cancel=False)
                else:
                    yield from self._close(request, request.finish(message, reason))

    def _start(self, event: Open, now: float) -> Iterator[Effect]:
        refusal = self._no_room()
        if refusal is not None:
            yield Emit(event.key, Failed(refusal))
            return
        request = OpenRequest(event.key, event.submit, now, event.deadline)
        self.requests[event.key] = request
        self._wake_link(now)
        if self.phase == "open":
            yield self._submit(request, now)

    def _ask(self, event: Ask, now: float) -> Iterator[Effect]:
        refusal = self._no_room()
        if refusal is not None:
            yield Emit(event.key, Failed(refusal))
        elif event.what == "ready" and self.phase == "open" and self._welcome is not None:
            yield Emit(event.key, Ready(self._welcome.model, self._welcome.max_model_len))
        else:
            self.asks[event.key] = (event, now)
            self._wake_link(now)
            if self.phase == "open":
                yield Send(StatusQuery(query=event.key, order=event.order))

    def _no_room(self) -> WireError | None:
        if self.phase == "left":
            return WireError(code="cancelled", message="this client is closed")
        if len(self.requests) + len(self.asks) < self._limits.max_open:
            return None
        message = f"this client has {self._limits.max_open} calls open; wait for some to end"
        return WireError(code="overloaded", message=message, retryable=True, retry_after=1.0)

    def _wake_link(self, now: float) -> None:
        if self._redial_at == math.inf:
            self._redial_at = now

    def _abort(self, key: int) -> Iterator[Effect]:
        self.asks.pop(key, None)
        request = self.requests.pop(key, None)
        if request is not None:
            yield from self._withdraw(request)

    def _withdraw(self, request: OpenRequest) -> Iterator[Effect]:
        if request.attempt is not None:
            del self._attempts[request.attempt]
            yield Send(Cancel(id=request.attempt))
            request.attempt = None

    def _close(self, request: OpenRequest, update: Finished | Failed) -> Iterator[Effect]:
        if request.attempt is not None:
            self._attempts.pop(request.attempt, None)
        del self.requests[request.key]
        yield Emit(request.key, update)

    def _submit(self, request: OpenRequest, now: float) -> Send:
        self._last_attempt += 1
        self._attempts[self._last_attempt] = request
        return Send(request.submission(self._last_attempt, now))

    def _resubmit(
        self, request: OpenRequest, now: float, *, send_cancel: bool = True
    ) -> Iterator[Effect]:
        if send_cancel:
            yield from self._withdraw(request)
        elif request.attempt is not None:
            del self._attempts[request.attempt]
            request.attempt = None
        yield from self._submit_or_give_up(request, now)

    def _submit_or_give_up(self, request: OpenRequest, now: float) -> Iterator[Effect]:
        assert self._welcome is not None
        if request.stalls >= self._limits.max_stalls:
            message = f"gave up after {request.stalls} submissions without a new token"
            error = WireError(code="connection_lost", message=message, retryable=True)
            yield from self._close(request, Failed(error))
        elif request.tokens and request.model != self._welcome.model:
            message = (
                f"the stream began on model {request.model!r}, but the gateway now serves "
                f"{self._welcome.model!r}"
            )
            error = WireError(code="connection_lost", message=message, retryable=True)
            yield from self._close(request, Failed(error))
        else:
            yield self._submit(request, now)

    def _oversized(self, event: Oversized) -> Iterator[Effect]:
        request = self._attempts.get(event.attempt)
        if request is not None:
            message = f"the request takes {event.size} bytes, more than one message may hold"
            yield from self._close(request, Failed(WireError(code="too_large", message=message)))

    def _welcomed(self, message: Welcome, now: float) -> Iterator[Effect]:
        if self.phase != "greeting":
            self.late += 1
            return
        self.phase, self._welcome = "open", message
        self._ping_at = now + PING_INTERVAL
        self._backoff = self._limits.first_backoff
        for key, (ask, _) in list(self.asks.items()):
            if ask.what == "ready":
                del self.asks[key]
                yield Emit(key, Ready(message.model, message.max_model_len))
            else:
                yield Send(StatusQuery(query=key, order=ask.order))
        for request in list(self.requests.values()):
            yield from self._submit_or_give_up(request, now)

    def _refused(self, error: WireError, now: float) -> Iterator[Effect]:
        yield from self._lose_link(error.message, now)
        if error.retryable:
            self._redial_at = max(self._redial_at, now + (error.retry_after or 0.0))
            return
        self._redial_at = math.inf
        yield from self._fail_all(error)

    def _fail_all(self, error: WireError) -> Iterator[Effect]:
        for request in list(self.requests.values()):
            yield from self._close(request, Failed(error))
        for key in list(self.asks):
            del self.asks[key]
            yield Emit(key, Failed(error))

    def _status(self, message: StatusReply) -> Iterator[Effect]:
        if self.asks.pop(message.query, None) is None:
            self.late += 1
        elif message.error is not None:
            yield Emit(message.query, Failed(message.error))
        else:
            yield Emit(message.query, Fleet(message.fleet))

    def _lose_link(self, why: str, now: float) -> Iterator[Effect]:
        if self.phase == "open":
            self._down_since = now
        self.phase, self._trouble = "waiting", why
        self._redial_at = now + self._backoff
        self._backoff = min(self._backoff * 2, self._limits.last_backoff)
        self._attempts.clear()
        for request in self.requests.values():
            request.attempt = None
        yield HangUp()

    def _tick(self, now: float) -> Iterator[Effect]:
        for request in [r for r in self.requests.values() if now >= self._patience_end(r)]:
            yield from self._withdraw(request)
            yield from self._close(request, Failed(self._expiry(request.deadline, now)))
        for key, (ask, asked) in list(self.asks.items()):
            if now >= self._ask_end(ask, asked):
                del self.asks[key]
                yield Emit(key, Failed(self._expiry(ask.deadline, now)))
        if self.phase == "waiting" and now >= self._redial_at:
            self.phase = "dialing"
            self.session += 1
            self._redial_at = -math.inf
            yield Dial(self.session)
        elif self.phase in ("greeting", "open"):
            if now >= self._heard + PEER_TIMEOUT:
                yield from self._lose_link(f"the gateway was silent for {PEER_TIMEOUT:g} s", now)
            elif now >= self._ping_at:
                self._ping_at = now + PING_INTERVAL
                yield Send(Ping())

    def _patience_end(self, request: OpenRequest) -> float:
        if self.phase == "open":
            return request.deadline
        known = request.seed is not None
        patience = self._limits.reconnect_timeout if known else self._limits.connect_timeout
        return min(request.deadline, max(self._down_since, request.opened) + patience)

    def _ask_end(self, ask: Ask, asked: float) -> float:
        if self.phase == "open":
            return ask.deadline
        return min(ask.deadline, max(self._down_since, asked) + self._limits.connect_timeout)

    def _expiry(self, deadline: float, now: float) -> WireError:
        if now >= deadline and self.phase == "open":
            message = "the call's timeout passed"
            return WireError(code="deadline_exceeded", message=message, retryable=True)
        message = f"no gateway answered at {self._endpoint} in time ({self._trouble})"
        code = "deadline_exceeded" if now >= deadline else "connection_lost"
        return WireError(code=code, message=message, retryable=True)

    def _leave(self) -> Iterator[Effect]:
        for request in list(self.requests.values()):
            yield from self._withdraw(request)
        if self.phase in ("greeting", "open"):
            yield Send(Bye())
        self.phase = "left"
        yield from self._fail_all(WireError(code="cancelled", message="this client was closed"))
