"""Runs the state machine: every request of every front end goes through here."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Protocol

from services.gateway.errors import RequestFailed
from services.gateway.events import (
    Abandon,
    Effect,
    Event,
    FailAll,
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
from services.gateway.later import Later
from services.gateway.state import GatewayState
from shared.alarm import Alarm
from shared.clock import Clock
from shared.errors import ErrorPayload, NoWorker
from shared.ids import Incarnation, RequestId
from shared.messages.fleet import FleetStatus
from shared.messages.gateway_router import (
    FleetQuery,
    FleetReply,
    FromGateway,
    Generate,
    RouterWelcome,
    ToGateway,
    TokenItem,
    WorkerOrder,
)
from shared.messages.request import Request, TokenLogprob

_MAX_QUERIES = 64


class Listener(Protocol):
    """Where the output of one request goes; none of these may block."""

    def on_tokens(self, items: list[TokenItem], now: float) -> None:
        """Take the next tokens, at least one."""
        ...

    def on_prompt_logprobs(self, items: tuple[TokenLogprob, ...]) -> None:
        """Take the log probabilities of prompt tokens 1..n-1; called at most once."""
        ...

    def on_end(self, done: Finished, now: float) -> None:
        """The request ended; called exactly once unless abandoned."""
        ...


class Broker:
    """Connects listeners to the state machine and the state machine to the router's link."""

    def __init__(
        self,
        state: GatewayState,
        incarnation: Incarnation,
        send: Callable[[FromGateway], bool],
        clock: Clock,
    ) -> None:
        self.state = state
        self.clock = clock
        self.unsent = 0
        self._send = send
        self._prefix = f"{incarnation:x}"
        self._last_id = 0
        self._listeners: dict[RequestId, Listener] = {}
        self._queries: dict[int, asyncio.Future[FleetReply]] = {}
        self._changed = asyncio.Event()
        self._alarm = Alarm(clock)
        self.later = Later()

    def new_id(self) -> RequestId:
        """Return an id no other request of the system has.

        Clients see it, so it does not count: a tenant would read off how busy the others are.
        """
        return RequestId(f"{self._prefix}-{secrets.token_hex(8)}")

    def require_room(self, count: int) -> None:
        """Raise ``RequestFailed`` if ``count`` more requests cannot be taken now."""
        error = self.state.refusal(count, self.clock.now())
        if error is not None:
            raise RequestFailed(error)

    def open(self, request: Request, deadline: float, listener: Listener) -> None:
        """Run a request; everything about it, its end included, goes to ``listener``."""
        self._listeners[request.request_id] = listener
        self._handle(Submit(request, deadline))

    def stop(self, request_id: RequestId) -> None:
        """End a request whose stop string was found; its ``on_end`` follows soon."""
        self._handle(Stop(request_id))

    def abandon(self, request_id: RequestId) -> None:
        """Cancel and forget a request; its listener hears nothing more."""
        if self._listeners.pop(request_id, None) is not None:
            self._handle(Abandon(request_id))
            self._changed.set()

    def receive(self, message: ToGateway) -> None:
        """Take a message of the router."""
        self._handle(FromRouter(message))
        if isinstance(message, RouterWelcome):
            self._changed.set()

    def tick(self) -> None:
        """Let time pass; wanted each time ``rest`` returns."""
        self._handle(Tick())

    async def rest(self, latest: float) -> None:
        """Sleep until the state machine wants to know the time again, or until ``latest``."""
        await self._alarm.sleep_until(min(latest, self.state.wake_at))

    async def fleet(self, timeout: float, order: WorkerOrder | None = None) -> FleetStatus:
        """Ask the router about the fleet after giving it an order, if any.

        Raises:
            NoWorker: no answer within ``timeout`` seconds, or no router.
            RequestFailed: the order was not taken.
        """
        if len(self._queries) >= _MAX_QUERIES:
            raise NoWorker("too many fleet queries wait for the router", retry_after=1.0)
        self._last_id += 1
        query = self._last_id
        answer: asyncio.Future[FleetReply] = asyncio.get_running_loop().create_future()
        self._queries[query] = answer
        try:
            async with asyncio.timeout(timeout):
                self._send(FleetQuery(query=query, order=order))
                reply = await answer
        except TimeoutError:
            raise NoWorker(f"the router did not answer within {timeout:g} s") from None
        finally:
            del self._queries[query]
        if reply.error is not None:
            raise RequestFailed(reply.error)
        return reply.status

    async def welcomed(self) -> None:
        """Wait until the router knows this gateway; the caller sets the time limit."""
        while not self.state.connected:
            self._changed.clear()
            await self._changed.wait()

    async def drain(self, timeout: float) -> None:
        """Take nothing new and wait for the open requests; what is left then fails."""
        self.state.draining = True
        try:
            async with asyncio.timeout(timeout):
                while self.state.num_open:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            message = "the gateway shut down before the request was complete"
            self._handle(FailAll(ErrorPayload(code="cancelled", message=message, retryable=True)))

    def _handle(self, event: Event) -> None:
        now = self.clock.now()
        for effect in self.state.handle(event, now):
            self._perform(effect, now)
        self._alarm.no_later_than(self.state.wake_at)

    def _perform(self, effect: Effect, now: float) -> None:
        if isinstance(effect, NewTokens):
            listener = self._listeners.get(effect.request_id)
            if listener is not None:
                listener.on_tokens(effect.items, now)
        elif isinstance(effect, Send):
            self._transmit(effect.message)
        elif isinstance(effect, Finished):
            ended = self._listeners.pop(effect.request_id, None)
            self._changed.set()
            if ended is not None:
                ended.on_end(effect, now)
        elif isinstance(effect, NewPromptLogprobs):
            listener = self._listeners.get(effect.request_id)
            if listener is not None:
                listener.on_prompt_logprobs(effect.items)
        elif isinstance(effect, FleetKnown):
            answer = self._queries.get(effect.reply.query)
            if answer is not None and not answer.done():
                answer.set_result(effect.reply)

    def _transmit(self, message: FromGateway) -> None:
        if self._send(message):
            return
        self.unsent += 1
        if isinstance(message, Generate):
            self._handle(Unsent(message.request.request_id))
