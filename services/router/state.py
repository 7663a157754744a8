"""The router as a pure machine: events in, effects out. No clock, no socket."""

from services.router.config import RouterConfig
from services.router.counters import Counters
from services.router.dispatch import Dispatcher
from services.router.drains import Drains
from services.router.effects import Effect, Outbox, Stop
from services.router.events import (
    ChangeRole,
    DrainRouter,
    DrainWorkerRequested,
    Event,
    GatewayMessage,
    GatewayUnreachable,
    Tick,
    WorkerExited,
    WorkerMessage,
    WorkerUnreachable,
)
from services.router.fleet import Fleet
from services.router.gateways import Gateways
from services.router.legs import LegTable
from services.router.outputs import Outputs
from services.router.placement import blocks_for
from services.router.records import Worker
from services.router.recovery import Recovery
from services.router.requests import Requests, shutting_down
from shared.ids import Incarnation
from shared.messages.fleet import FleetStatus, WorkerStatus
from shared.messages.gateway_router import (
    CancelRequest,
    Drain,
    FleetQuery,
    FleetReply,
    GatewayHello,
    GatewayPing,
    Generate,
    RouterPong,
)
from shared.messages.hello import UnreadHello
from shared.messages.router_worker import (
    Drained,
    Report,
    StepOutput,
    TransferLost,
    WorkerBye,
    WorkerHello,
)

BEAT_INTERVAL = 1.0
STALL = 1.0
"""Seconds by which a tick is late that say the router itself stood still."""


class RouterState:
    """``handle`` is the only entrance; ``now`` is monotonic seconds and never goes back.

    A ``Tick`` is wanted at ``wake_at``, which every event may change; an earlier one does no harm.
    """

    def __init__(self, config: RouterConfig, incarnation: Incarnation, now: float) -> None:
        self.config = config
        self.incarnation = incarnation
        self.counters = Counters()
        self._started = self.wake_at = now
        self._beaten = float("-inf")
        self._closed_seen = 0
        self._drain_until: float | None = None
        self._outbox = outbox = Outbox()
        workers: dict[bytes, Worker] = {}
        self.legs = LegTable(incarnation)
        dispatcher = Dispatcher(self.legs, outbox, self.counters)
        self.requests = Requests(config, dispatcher, outbox, self.counters, now)
        recovery = Recovery(config, workers, self.requests, dispatcher, outbox, self.counters)
        self.fleet = Fleet(config, incarnation, workers, recovery, outbox, self.counters)
        self.drains = Drains(workers, recovery, outbox)
        self.gateways = Gateways(
            incarnation, config.worker_timeout, self.requests, outbox, self.counters
        )
        self._outputs = Outputs(
            self.legs, self.requests, recovery, dispatcher, outbox, self.counters
        )

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event and return what is to be done about it, in order."""
        if isinstance(event, WorkerMessage):
            self._worker_message(event, now)
        elif isinstance(event, GatewayMessage):
            self._gateway_message(event, now)
        elif isinstance(event, Tick):
            self._tick(event, now)
        else:
            self._other(event, now)
        tokens_only = isinstance(event, WorkerMessage) and isinstance(event.message, StepOutput)
        if not tokens_only or self.legs.closed != self._closed_seen:
            self._closed_seen = self.legs.closed
            self.requests.place_all(self.fleet.by_peer.values(), now)
        self.wake_at = self._due()
        if self._drain_until is not None and not self.requests.open:
            self._outbox.effects.append(Stop())
        return self._outbox.take()

    def status(self, now: float) -> FleetStatus:
        """Describe fleet, queue and counters."""
        workers = tuple(
            WorkerStatus(
                worker=worker.hello.worker,
                role=worker.role,
                health=worker.health,
                incarnation=worker.hello.incarnation,
                pid=worker.hello.pid,
                age=now - worker.last_heard,
                load=worker.load,
                counters=worker.counters,
                pairs=worker.pairs,
                drained=worker.drained,
                readers=worker.readers,
            )
            for worker in sorted(self.fleet.by_peer.values(), key=lambda w: w.hello.worker)
        )
        return FleetStatus(
            incarnation=self.incarnation,
            uptime=now - self._started,
            queued=len(self.requests.queue),
            open_requests=len(self.requests.open),
            draining=self._drain_until is not None,
            workers=workers,
            counters=self.counters.snapshot(),
            other_version=self.counters.other_version,
        )

    def check(self) -> None:
        """Recompute every invariant; raises ``AssertionError``."""
        self.requests.check()
        self.legs.check()
        self.fleet.check()
        self.gateways.check()
        ends = self.counters.finished + self.counters.cancelled + self.counters.failed
        assert self.counters.accepted == ends + len(self.requests.open)
        for leg in self.legs.by_id.values():
            assert self.requests.open[leg.open.request.request_id] is leg.open
        assert self.wake_at <= self._due()

    def _worker_message(self, event: WorkerMessage, now: float) -> None:
        message, peer = event.message, event.peer
        if isinstance(message, WorkerHello):
            self.fleet.hello(peer, message, now)
            return
        if isinstance(message, UnreadHello):
            self.fleet.unread(peer, message, now)
            return
        worker = self.fleet.by_peer.get(peer)
        if worker is None:
            self.counters.late_messages += 1
            if isinstance(message, Report):
                self.fleet.stranger(peer)
            return
        self.fleet.heard(worker, now)
        if isinstance(message, StepOutput):
            self.fleet.progress(worker, message.step, now)
            self._outputs.step(worker, message, now)
        elif isinstance(message, Report):
            self.fleet.report(worker, message, now)
        elif isinstance(message, TransferLost):
            self._outputs.transfer_lost(worker, message, now)
        elif isinstance(message, Drained):
            self.drains.drained(worker, now)
        elif isinstance(message, WorkerBye):
            self.fleet.bye(worker, now)

    def _gateway_message(self, event: GatewayMessage, now: float) -> None:
        message, peer = event.message, event.peer
        if isinstance(message, GatewayHello):
            self.gateways.hello(peer, message, now)
            return
        gateway = self.gateways.by_peer.get(peer)
        if gateway is None:
            self.gateways.stranger(peer)
            return
        gateway.last_heard = now
        if isinstance(message, Generate):
            self.requests.accept(gateway, message.request, now)
        elif isinstance(message, CancelRequest):
            request = gateway.requests.get(message.request_id)
            if request is None:
                self.counters.late_messages += 1
            else:
                self.requests.end(request)
        elif isinstance(message, GatewayPing):
            self._outbox.gateway(gateway, RouterPong(incarnation=self.incarnation))
        elif isinstance(message, FleetQuery):
            order, error = message.order, None
            if order is not None:
                error = self.drains.order(order.worker, order.role)
            reply = FleetReply(query=message.query, status=self.status(now), error=error)
            self._outbox.gateway(gateway, reply)
        elif isinstance(message, Drain):
            self._drain(now)

    def _other(self, event: Event, now: float) -> None:
        if isinstance(event, WorkerUnreachable):
            self.fleet.unreachable(event.peer, now)
        elif isinstance(event, WorkerExited):
            self.fleet.exited(event.peer, now)
        elif isinstance(event, GatewayUnreachable):
            gateway = self.gateways.by_peer.get(event.peer)
            if gateway is not None:
                self.gateways.drop(gateway, "it cannot be reached")
        elif isinstance(event, DrainRouter):
            self._drain(now)
        elif isinstance(event, DrainWorkerRequested):
            self.drains.order(event.worker, None)
        elif isinstance(event, ChangeRole):
            self.drains.order(event.worker, event.role)

    def _drain(self, now: float) -> None:
        if self._drain_until is None:
            self._drain_until = now + self.config.drain_timeout
            self.requests.draining = True
            self._outbox.note(f"draining: {len(self.requests.open)} requests are open")

    def _tick(self, event: Tick, now: float) -> None:
        self.counters.rejected_frames = event.rejected_frames
        late = now - self.wake_at
        if late > STALL:
            self.fleet.forgive(late, now)
            self.gateways.forgive(late, now)
        self.fleet.tick(now)
        self.gateways.tick(now)
        self.requests.expire(now)
        if self._drain_until is not None and now >= self._drain_until:
            self.requests.fail_all(shutting_down)
        if now - self._beaten >= BEAT_INTERVAL:
            self._beaten = now
            self.fleet.beat()
            self._charge_growth()

    def _due(self) -> float:
        """Return when time alone makes something happen, at the latest when a beat is due."""
        due = min(self._beaten + BEAT_INTERVAL, self.fleet.due, self.gateways.due)
        due = min(due, self.requests.due)
        if self._drain_until is not None and self.requests.open:
            due = min(due, self._drain_until)
        return due

    def _charge_growth(self) -> None:
        """Count blocks of outputs that became longer than was predicted for them."""
        for leg in self.legs.by_id.values():
            if leg.kind != "prefill":
                hello = leg.worker.hello
                size = hello.compatibility.block_size
                needed = blocks_for(leg.open.num_tokens + 1, size)
                self.legs.grow(leg, min(needed, hello.blocks_total))
