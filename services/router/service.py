"""The router's sockets, clock and process watches around ``RouterState``."""

import asyncio
import logging

import zmq

from services.router.config import RouterConfig
from services.router.effects import (
    Effect,
    Note,
    SendGateway,
    SendWorker,
    Stop,
    UnwatchProcess,
    WatchProcess,
)
from services.router.events import (
    DrainRouter,
    Event,
    GatewayMessage,
    GatewayUnreachable,
    Tick,
    WorkerExited,
    WorkerMessage,
    WorkerUnreachable,
)
from services.router.state import RouterState
from shared.alarm import Alarm
from shared.clock import Clock
from shared.config import SecuritySection
from shared.errors import ResourceMissing
from shared.ids import HostId, Incarnation
from shared.messages.gateway_router import FleetQuery, FromGateway, ToGateway
from shared.messages.hello import UnreadHello
from shared.messages.router_worker import FromWorker, ToWorker
from shared.telemetry.bounded_log import BoundedLog, one_line
from shared.transport.link import Receive, RouterLink
from shared.transport.liveness import PidWatch, watch_pid
from shared.transport.security import security_for

log = logging.getLogger(__name__)

LAST_WORDS = 0.02
"""Seconds between the end of a worker's process and taking it for gone."""

FAREWELL = 0.2
"""Seconds given to the sockets to carry the last messages away."""


class RouterService:
    """Both links of the router; made and used on one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        incarnation: Incarnation,
        context: "zmq.Context[zmq.Socket[bytes]]",
        host: HostId,
        clock: Clock,
    ) -> None:
        self.state = RouterState(config, incarnation, clock.now())
        self._context = context
        self._host = host
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._watches: dict[bytes, PidWatch] = {}
        self._pending: list[Event] = []
        self._busy = False
        self._alarm = Alarm(clock)
        self._frequent = BoundedLog(log)
        self._stopped = False
        self._gateways: RouterLink[FromGateway, ToGateway] | None = None
        self._workers: RouterLink[FromWorker | UnreadHello, ToWorker] | None = None

    def bind(self, gateways: str, workers: str, security: SecuritySection) -> None:
        """Bind both endpoints. Raises ``ResourceMissing`` or ``BadConfig``."""
        self._gateways = RouterLink(
            self._context,
            gateways,
            FromGateway,
            self._hear_gateway,
            security=security_for(gateways, security, "bind"),
        )
        self._workers = RouterLink(
            self._context,
            workers,
            Receive(FromWorker, UnreadHello),
            lambda peer, message: self.feed(WorkerMessage(peer, message)),
            security=security_for(workers, security, "bind"),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set or a ``Drain`` came, and everything open has ended."""
        stopping = asyncio.create_task(stop.wait())
        stopping.add_done_callback(lambda _: self._alarm.no_later_than(0.0))
        try:
            while not self._stopped:
                if stop.is_set():
                    self.feed(DrainRouter())
                self.feed(Tick(self._rejected()))
                self._frequent.flush()
                if not self._stopped:
                    await self._alarm.sleep_until(self.state.wake_at)
        finally:
            stopping.cancel()
        await asyncio.sleep(FAREWELL)

    def close(self) -> None:
        """Close links and watches. Idempotent."""
        for watch in self._watches.values():
            watch.cancel()
        self._watches.clear()
        for link in (self._gateways, self._workers):
            if link is not None:
                link.close()
        self._gateways = self._workers = None

    def feed(self, event: Event) -> None:
        """Let the state see an event and do what it asks for.

        What goes wrong while doing so is an event again, seen after all effects are done.
        """
        self._pending.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._pending:
                for effect in self.state.handle(self._pending.pop(0), self._clock.now()):
                    self._perform(effect)
        finally:
            self._busy = False
        self._alarm.no_later_than(0.0 if self._stopped else self.state.wake_at)

    def _hear_gateway(self, peer: bytes, message: FromGateway) -> None:
        if isinstance(message, FleetQuery):
            self.feed(Tick(self._rejected()))  # its answer has this count, too
        self.feed(GatewayMessage(peer, message))

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, SendGateway):
            if self._gateways is not None and not self._gateways.send(effect.peer, effect.message):
                self.feed(GatewayUnreachable(effect.peer))
        elif isinstance(effect, SendWorker):
            if self._workers is not None and not self._workers.send(effect.peer, effect.message):
                self.feed(WorkerUnreachable(effect.peer))
        elif isinstance(effect, Note):
            self._write(effect)
        elif isinstance(effect, WatchProcess):
            self._watch(effect)
        elif isinstance(effect, UnwatchProcess):
            watch = self._watches.pop(effect.peer, None)
            if watch is not None:
                watch.cancel()
        elif isinstance(effect, Stop):
            self._stopped = True

    def _write(self, note: Note) -> None:
        if note.frequent:
            self._frequent.warning(note.text)
        else:
            level = logging.WARNING if note.warning else logging.INFO
            log.log(level, "%s", one_line(note.text))

    def _watch(self, effect: WatchProcess) -> None:
        if effect.host != self._host:
            return
        peer = effect.peer

        def ended() -> None:
            # what it said last may still be unread
            self._loop.call_later(LAST_WORDS, self.feed, WorkerExited(peer))

        try:
            self._watches[peer] = watch_pid(self._loop, effect.pid, ended)
        except ResourceMissing as error:
            log.warning("%s; its silence will have to do", error.message)

    def _rejected(self) -> int:
        return sum(link.rejected for link in (self._gateways, self._workers) if link is not None)
