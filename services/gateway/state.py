"""The truth of every open request: prompt, sampling and the output tokens already received.

The router may restart, fall silent or lose messages; each time the rest of every open request
goes out again under a fresh wire id (``<request>.<attempt>``), so that whatever a former
attempt still sends is unknown here and dropped. Tokens are taken exactly once, by index.
"""

from collections.abc import Iterable

from msgspec import Struct, structs

from services.gateway.events import (
    Abandon,
    Effect,
    Event,
    Finished,
    FleetKnown,
    FromRouter,
    NewPromptLogprobs,
    NewTokens,
    Send,
    Stop,
    Submit,
    Tick,
    Unsent,
)
from services.gateway.open_request import OpenRequest
from services.gateway.refusals import no_router, shutting_down, too_late, too_many
from shared.errors import ErrorPayload
from shared.ids import GatewayId, Incarnation, RequestId
from shared.messages.gateway_router import (
    CancelRequest,
    Ended,
    FleetReply,
    GatewayHello,
    GatewayPing,
    Generate,
    PromptLogprobs,
    RouterPong,
    RouterWelcome,
    ToGateway,
    TokenItem,
    Tokens,
)
from shared.messages.hello import WIRE_VERSION

PING_INTERVAL = 1.0
"""Seconds between two heartbeats, and between two hellos to a silent router."""
SLOW_INTERVAL = 5.0
"""The same once the router has been gone for longer than open requests wait."""
OUTAGE_LIMIT = 30.0
"""Seconds that open requests outlive the loss of the router, or of all its workers."""
SETTLE_TIME = 10.0
"""Seconds after the router's start in which its workers may still be on their way."""
RETRY_AFTER = 0.5
"""Seconds before a resumed request that was turned away is offered again."""
STOP_TIMEOUT = 2.0
"""Seconds to wait for the usage of a request that a stop string ended."""
MAX_FAULTS = 3
"""Gaps and unasked cancellations one request survives."""


class GatewayCounters(Struct):
    """Monotonic since start."""

    tokens: int = 0
    duplicates: int = 0
    late_messages: int = 0
    gaps: int = 0
    resubmitted: int = 0


class GatewayState:
    """Open requests of one gateway. ``max_open`` bounds them, ``silence`` is in seconds.

    A ``Tick`` is wanted at ``wake_at``, which every event may change; an earlier one does no harm.
    ``decoded_at`` is when a token came that was not the first of its output: decode works.
    """

    def __init__(
        self,
        gateway: GatewayId,
        incarnation: Incarnation,
        *,
        max_open: int,
        silence: float,
        max_model_len: int,
        now: float,
    ) -> None:
        self._hello = GatewayHello(
            gateway=gateway, incarnation=incarnation, wire_version=WIRE_VERSION
        )
        self._max_open = max_open
        self._silence = silence
        self._max_model_len = max_model_len
        self._open: dict[RequestId, OpenRequest] = {}
        self._wire: dict[RequestId, OpenRequest] = {}
        self._router: Incarnation | None = None
        self._welcomed_at = now
        self._outage_since: float | None = now
        self._heard_at = now
        self._sent_at = float("-inf")
        self._open_due = float("inf")
        self.decoded_at = float("-inf")
        self.draining = False
        self.counters = GatewayCounters()

    @property
    def connected(self) -> bool:
        """The router welcomed this gateway and has not fallen silent since."""
        return self._outage_since is None

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def wake_at(self) -> float:
        """When time alone makes something happen."""
        due = self._open_due
        if self._outage_since is None:
            due = min(due, self._heard_at + self._silence)
        elif self._open:
            due = min(due, self._outage_since + OUTAGE_LIMIT)
        return min(due, self._beat_due())

    def refusal(self, count: int, now: float) -> ErrorPayload | None:
        """Say why ``count`` more requests cannot be taken, None if they can."""
        if self.draining:
            return shutting_down()
        if len(self._open) + count > self._max_open:
            return too_many(len(self._open), count, self._max_open)
        if self._outage_since is not None and now - self._outage_since > OUTAGE_LIMIT:
            return no_router()
        return None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at monotonic time ``now`` and say what to do about it."""
        if isinstance(event, FromRouter):
            return self._from_router(event.message, now)
        if isinstance(event, Submit):
            return self._submit(event, now)
        if isinstance(event, Stop):
            return self._stop(event.request_id, now)
        if isinstance(event, Abandon):
            return self._abandon(event.request_id)
        if isinstance(event, Tick):
            return self._tick(now)
        if isinstance(event, Unsent):
            return self._unsent(event.wire_id, now)
        return [e for o in list(self._open.values()) for e in self._fail(o, event.error)]

    def check(self) -> None:
        """Recompute what the tables must agree on; raises ``AssertionError``."""
        assert len(self._open) <= self._max_open
        wired = {o.wire_id: o for o in self._open.values() if o.wire_id is not None}
        assert wired == self._wire
        for opened in self._open.values():
            assert len(opened.output) <= opened.request.sampling.max_tokens
            assert self._open_due <= opened.due(connected=self.connected)
            assert not (opened.wire_id is None and self.connected and opened.retry_at is None)

    def _from_router(self, message: ToGateway, now: float) -> list[Effect]:
        self._heard_at = now
        if isinstance(message, Tokens):
            return self._tokens(message, now)
        if isinstance(message, Ended):
            return self._ended(message, now)
        if isinstance(message, PromptLogprobs):
            return self._prompt_logprobs(message)
        if isinstance(message, FleetReply):
            return [FleetKnown(message)]
        if isinstance(message, RouterPong):
            return self._pong(message, now)
        return self._welcome(message, now)

    def _submit(self, event: Submit, now: float) -> list[Effect]:
        request_id = event.request.request_id
        if request_id in self._open:
            raise ValueError(f"request id {request_id} is in use")
        error = self.refusal(1, now)
        if error is not None:
            return [Finished(request_id=request_id, error=error)]
        opened = OpenRequest(event.request, event.deadline, list(event.request.output_ids))
        self._open[request_id] = opened
        self._watch(opened)
        return self._dispatch(opened, now) if self.connected else []

    def _dispatch(self, opened: OpenRequest, now: float) -> list[Effect]:
        """Send the rest of a request under a fresh wire id, or end it if nothing is left."""
        request = opened.request
        effects = self._cancel_wire(opened)
        opened.retry_at = None
        if opened.stop_until is not None:
            return [*effects, self._finish(opened, Finished(request_id=request.request_id))]
        reason = opened.whole(self._max_model_len)
        if reason is not None:
            done = Finished(request_id=request.request_id, reason=reason)
            return [*effects, self._finish(opened, done)]
        opened.attempts += 1
        self.counters.resubmitted += opened.attempts > 1
        wire_id = RequestId(f"{request.request_id}.{opened.attempts}")
        opened.wire_id = wire_id
        self._wire[wire_id] = opened
        return [*effects, Send(Generate(request=opened.rest(wire_id, now)))]

    def _tokens(self, message: Tokens, now: float) -> list[Effect]:
        effects: list[Effect] = []
        fresh: dict[RequestId, list[TokenItem]] = {}
        gaps: dict[RequestId, OpenRequest] = {}
        wire, counters = self._wire, self.counters
        for item in message.items:
            opened = wire.get(item.request_id)
            if opened is None:
                counters.late_messages += 1
                continue
            expected = len(opened.output)
            if item.index == expected < opened.request.sampling.max_tokens:
                opened.output.append(item.token)
                if opened.stop_until is None:
                    fresh.setdefault(opened.request.request_id, []).append(item)
            elif item.index > expected:
                gaps[item.request_id] = opened
            else:
                counters.duplicates += 1
        for request_id, items in fresh.items():
            counters.tokens += len(items)
            if items[-1].index:
                self.decoded_at = now
            self._open[request_id].patience = None
            effects.append(NewTokens(request_id, items))
        for opened in gaps.values():
            counters.gaps += 1
            effects += self._fault(opened, "tokens were lost on the way", now)
        return effects

    def _ended(self, message: Ended, now: float) -> list[Effect]:
        opened = self._wire.get(message.request_id)
        if opened is None:
            self.counters.late_messages += 1
            return []
        self._forget_wire(opened)
        if opened.stop_until is None:
            if message.error is not None:
                return self._refused(opened, message.error, now)
            if message.reason is None:
                return self._fault(opened, "the router cancelled the request", now)
            if message.num_tokens > len(opened.output):
                self.counters.gaps += 1
                return self._fault(opened, "the last tokens were lost on the way", now)
        done = Finished(
            request_id=opened.request.request_id,
            reason=message.reason,
            num_cached_tokens=min(message.num_cached_tokens, len(opened.request.prompt_ids)),
            timeline=message.timeline,
        )
        return [self._finish(opened, done)]

    def _refused(self, opened: OpenRequest, error: ErrorPayload, now: float) -> list[Effect]:
        """End with the router's error; only a resumed request is offered again for a while."""
        settling = error.code == "no_worker" and now - self._welcomed_at < SETTLE_TIME
        resumed = error.code in ("no_worker", "overloaded") and opened.resumed
        if opened.patience is None:
            opened.patience = now + OUTAGE_LIMIT
        if (settling or resumed) and now < opened.patience:
            opened.retry_at = now + RETRY_AFTER
            self._watch(opened)
            return []
        return self._fail(opened, error)

    def _fault(self, opened: OpenRequest, what: str, now: float) -> list[Effect]:
        opened.faults += 1
        if opened.faults > MAX_FAULTS:
            message = f"gave up after {opened.faults} attempts: {what}"
            return self._fail(
                opened, ErrorPayload(code="worker_lost", message=message, retryable=True)
            )
        return self._dispatch(opened, now) if self.connected else self._cancel_wire(opened)

    def _prompt_logprobs(self, message: PromptLogprobs) -> list[Effect]:
        opened = self._wire.get(message.request_id)
        if opened is None or opened.prompt_logprobs_seen:
            self.counters.late_messages += 1
            return []
        opened.prompt_logprobs_seen = True
        return [NewPromptLogprobs(opened.request.request_id, message.items)]

    def _welcome(self, message: RouterWelcome, now: float) -> list[Effect]:
        if self.connected and message.incarnation == self._router:
            return []
        if message.incarnation != self._router:
            self._welcomed_at = now
        self._router = message.incarnation
        self._outage_since = None
        return self._dispatch_all(self._open.values(), now)

    def _pong(self, message: RouterPong, now: float) -> list[Effect]:
        if message.incarnation == self._router:
            return []
        return self._lose_router(now)

    def _dispatch_all(self, several: Iterable[OpenRequest], now: float) -> list[Effect]:
        return [e for opened in list(several) for e in self._dispatch(opened, now)]

    def _stop(self, request_id: RequestId, now: float) -> list[Effect]:
        opened = self._open.get(request_id)
        if opened is None or opened.stop_until is not None:
            return []
        if opened.wire_id is None:
            return [self._finish(opened, Finished(request_id=request_id))]
        opened.stop_until = now + STOP_TIMEOUT
        self._watch(opened)
        return [Send(CancelRequest(request_id=opened.wire_id))]

    def _abandon(self, request_id: RequestId) -> list[Effect]:
        opened = self._open.pop(request_id, None)
        return [] if opened is None else self._cancel_wire(opened)

    def _unsent(self, wire_id: RequestId, now: float) -> list[Effect]:
        opened = self._wire.get(wire_id)
        if opened is not None:
            self._forget_wire(opened)
            opened.retry_at = now + RETRY_AFTER
            self._watch(opened)
        return []

    def _watch(self, opened: OpenRequest) -> None:
        """Have a tick no later than when this request wants one."""
        self._open_due = min(self._open_due, opened.due(connected=self.connected))

    def _tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self.connected and now - self._heard_at > self._silence:
            effects += self._lose_router(now)
        elif now >= self._beat_due():
            self._sent_at = now
            effects.append(Send(GatewayPing() if self.connected else self._hello))
        outage = self._outage_since is not None and now - self._outage_since > OUTAGE_LIMIT
        if now < self._open_due and not outage:
            return effects
        for opened in list(self._open.values()):
            if opened.stop_until is not None:
                if now >= opened.stop_until or outage:
                    effects += self._cancel_wire(opened)
                    done = Finished(request_id=opened.request.request_id)
                    effects.append(self._finish(opened, done))
            elif now >= opened.deadline:
                effects += self._fail(opened, too_late())
            elif outage:
                effects += self._fail(opened, no_router())
            elif opened.retry_at is not None and now >= opened.retry_at and self.connected:
                effects += self._dispatch(opened, now)
        dues = (o.due(connected=self.connected) for o in self._open.values())
        self._open_due = min(dues, default=float("inf"))
        return effects

    def _beat_due(self) -> float:
        """When to beat next; hellos to a router long gone pile up in the link's outbox."""
        soon = self._sent_at + PING_INTERVAL
        long_gone = self._outage_since is not None and soon - self._outage_since > OUTAGE_LIMIT
        return self._sent_at + SLOW_INTERVAL if long_gone else soon

    def _lose_router(self, now: float) -> list[Effect]:
        if self._outage_since is None:
            self._outage_since = now
        self._sent_at = now
        return [Send(self._hello)]

    def _fail(self, opened: OpenRequest, error: ErrorPayload) -> list[Effect]:
        effects = self._cancel_wire(opened)
        done = Finished(request_id=opened.request.request_id, error=error)
        return [*effects, self._finish(opened, done)]

    def _finish(self, opened: OpenRequest, done: Finished) -> Finished:
        self._forget_wire(opened)
        del self._open[opened.request.request_id]
        if opened.stop_until is not None:
            return structs.replace(done, reason="stop", error=None)
        return done

    def _cancel_wire(self, opened: OpenRequest) -> list[Effect]:
        if opened.wire_id is None:
            return []
        cancel = Send(CancelRequest(request_id=opened.wire_id))
        self._forget_wire(opened)
        return [cancel]

    def _forget_wire(self, opened: OpenRequest) -> None:
        if opened.wire_id is not None:
            self._wire.pop(opened.wire_id, None)
            opened.wire_id = None
