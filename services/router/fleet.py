"""The table of workers: who fits, who is ready, who is hung or gone."""

from collections import OrderedDict, deque

from msgspec import Struct

from services.router.config import RouterConfig
from services.router.counters import Counters
from services.router.effects import Outbox, UnwatchProcess, WatchProcess
from services.router.introductions import Introductions
from services.router.prefix_index import PrefixIndex
from services.router.records import Worker
from services.router.recovery import Recovery
from shared.errors import DiptychError, IncompatiblePeer, InvalidRequest, WorkerLost
from shared.ids import DispatchId, Incarnation
from shared.messages.hello import WIRE_VERSION, Compatibility, UnreadHello, two_versions
from shared.messages.router_worker import (
    CancelWork,
    Report,
    RouterBeat,
    WorkerHello,
    WorkerRefused,
    WorkerWelcome,
)

MAX_WORKERS = 1024
MAX_PREFIX_BLOCKS = 65_536
"""Blocks of one worker's prefix cache that the router keeps in mind."""

LOST_DISPATCH_AFTER = 3.0
"""Seconds after which a dispatch that an idle worker does not have counts as lost."""


class Departed(Struct, frozen=True):
    """A worker that was taken out of the table but may live; what to cancel if it is back."""

    incarnation: Incarnation
    abandoned: deque[DispatchId]


class Fleet:
    """Health is judged by messages handled, never by load.

    lost: silent for ``worker_timeout``, unreachable, or its process ended. hung: busy, but no
    step finished for ``hung_after``. Either way its work moves at once. ``due``: no worker
    becomes one of these by mere silence before that moment.
    """

    def __init__(
        self,
        config: RouterConfig,
        incarnation: Incarnation,
        workers: dict[bytes, Worker],
        recovery: Recovery,
        outbox: Outbox,
        counters: Counters,
    ) -> None:
        self.by_peer = workers
        self.due = float("inf")
        self._departed: OrderedDict[bytes, Departed] = OrderedDict()
        self.compatibility: Compatibility | None = None
        self._config = config
        self._incarnation = incarnation
        self._recovery = recovery
        self._outbox = outbox
        self._introductions = Introductions()
        self._counters = counters

    def hello(self, peer: bytes, message: WorkerHello, now: float) -> None:
        """Welcome a worker that fits the fleet; the first one defines what fits."""
        if self._lost_its_name(peer, message):
            text = f"another process has taken the name {message.worker}"
            self._refuse(peer, message.worker, IncompatiblePeer(text), now)
            return
        for other in list(self.by_peer.values()):
            same_name = other.hello.worker == message.worker
            if (same_name and other.peer != peer) or (
                other.peer == peer and other.hello.incarnation != message.incarnation
            ):
                self._remove(other, "was replaced", now)
        known = self.by_peer.get(peer)
        error = self._objection(known, message)
        if error is not None:
            version = message.compatibility.wire_version
            if version != WIRE_VERSION:
                self._counters.another_version(message.worker, version)
            self._refuse(peer, message.worker, error, now)
            return
        self.compatibility = message.compatibility
        if known is None:
            known = self._add(peer, message, now)
        else:
            known.hello, known.role = message, message.role
        self._introductions.joined(known)
        self._outbox.worker(known, WorkerWelcome(incarnation=self._incarnation))
        self.heard(known, now)
        self._cancel_abandoned(known)

    def unread(self, peer: bytes, message: UnreadHello, now: float) -> None:
        """Refuse a worker of another version by name."""
        self._counters.another_version(message.worker, message.compatibility.wire_version)
        text = f"the worker does not fit the fleet: {message.difference()}"
        self._refuse(peer, message.worker, IncompatiblePeer(text), now)

    def heard(self, worker: Worker, now: float) -> None:
        """Any message is a sign of life; a lost worker learns what it must drop."""
        worker.last_heard = now
        if worker.health != "lost":
            return
        others = [w for w in self.by_peer.values() if w.health != "lost"]
        if others and self._differs(worker.hello.compatibility):
            error = self._mismatch(worker.hello.compatibility)
            self._outbox.worker(worker, WorkerRefused(error=error.payload()))
            self._remove(worker, "no longer fits", now)
            return
        self.compatibility = worker.hello.compatibility
        worker.progress_at = now
        self._back(worker)
        self._watch(worker)
        self._cancel_abandoned(worker)

    def stranger(self, peer: bytes) -> None:
        """Let a worker from before a restart of this router see the new incarnation.

        One that was taken out of the table hears nothing: silence makes it say hello.
        """
        if peer not in self._departed:
            self._outbox.to_peer(peer, RouterBeat(incarnation=self._incarnation))

    def report(self, worker: Worker, message: Report, now: float) -> None:
        """Take a heartbeat."""
        load = worker.load = message.load
        worker.counters = message.counters
        worker.pairs, worker.readers = message.pairs, message.readers
        self.progress(worker, message.step, now, idle=not load.busy)
        if load.busy:
            self._watch(worker)
        self._stopping(worker, message.draining and not worker.drain_ordered)
        if not (load.busy or load.waiting or load.receiving or load.running or load.held):
            self._find_lost_dispatches(worker, now)

    def progress(self, worker: Worker, step: int, now: float, *, idle: bool = False) -> None:
        """Note a finished step, or that there is nothing to do; ends the state ``hung``."""
        if step == worker.step and not idle:
            return
        worker.step = step
        worker.progress_at = now
        if worker.health == "hung":
            self._back(worker)
            self._watch(worker)

    def bye(self, worker: Worker, now: float) -> None:
        """An orderly exit. Held KV needs no care: the worker outlived its leases."""
        for leg in list(worker.legs.values()):
            if leg.prefilled:
                self._recovery.release(leg)
        self._remove(worker, "left", now)

    def exited(self, peer: bytes, now: float) -> None:
        """The worker's process is gone for good."""
        worker = self.by_peer.get(peer)
        if worker is not None:
            self._remove(worker, "exited", now)

    def unreachable(self, peer: bytes, now: float) -> None:
        """A message to the worker could not be sent, and neither can its work."""
        worker = self.by_peer.get(peer)
        if worker is not None and worker.health != "lost":
            self._lose(worker, "cannot be reached", now)

    def tick(self, now: float) -> None:
        """Judge silence and standing steps."""
        self.due = float("inf")
        for worker in list(self.by_peer.values()):
            if worker.health == "lost":
                continue
            silent, standing = now - worker.last_heard, now - worker.progress_at
            if silent > self._config.worker_timeout:
                self._lose(worker, f"was silent for {silent:.1f} s", now)
            elif worker.health != "hung" and (
                worker.load.busy and standing > self._config.hung_after
            ):
                worker.health = "hung"
                self._move_work(worker, f"hangs: no step for {standing:.1f} s", now, tell=True)
            self._watch(worker)

    def beat(self) -> None:
        """Tell the workers that the router lives, and some of them where KV can come from."""
        introduced = self._introductions.next(self.by_peer.values())
        for worker in self.by_peer.values():
            if worker.health != "lost":
                sources = introduced.get(worker.peer, ())
                beat = RouterBeat(incarnation=self._incarnation, sources=sources)
                self._outbox.worker(worker, beat)

    def forgive(self, seconds: float, now: float) -> None:
        """The router itself stood still so long: nobody could be heard."""
        for worker in self.by_peer.values():
            worker.last_heard = min(now, worker.last_heard + seconds)
            worker.progress_at = min(now, worker.progress_at + seconds)

    def check(self) -> None:
        """Raise ``AssertionError`` unless every worker's load is the sum of its legs."""
        assert len(self.by_peer) <= MAX_WORKERS
        names = [worker.hello.worker for worker in self.by_peer.values()]
        assert len(set(names)) == len(names)
        assert len(self._departed) <= MAX_WORKERS
        assert not self._departed.keys() & self.by_peer.keys()
        for worker in self.by_peer.values():
            legs = worker.legs.values()
            assert worker.pending_tokens == sum(leg.pending_tokens for leg in legs)
            assert worker.committed_blocks == sum(leg.blocks for leg in legs)
            assert len(worker.prefix) <= worker.prefix.capacity
            if worker.health in ("lost", "hung"):
                assert not worker.legs
            else:
                assert not self._differs(worker.hello.compatibility)
            assert self.due <= self._due(worker)

    def _add(self, peer: bytes, message: WorkerHello, now: float) -> Worker:
        while len(self.by_peer) >= MAX_WORKERS:
            lost = next(w for w in self.by_peer.values() if w.health == "lost")
            self._remove(lost, "makes room", now)
        worker = Worker(
            peer=peer,
            hello=message,
            role=message.role,
            prefix=PrefixIndex(min(message.blocks_total, MAX_PREFIX_BLOCKS)),
            last_heard=now,
            progress_at=now,
        )
        self.by_peer[peer] = worker
        self._watch(worker)
        former = self._departed.pop(peer, None)
        if former is not None and former.incarnation == message.incarnation:
            worker.abandoned.extend(former.abandoned)
        self._outbox.effects.append(WatchProcess(peer, message.pid, message.host))
        self._outbox.note(f"worker {message.worker} ({message.role}) joined")
        return worker

    def _due(self, worker: Worker) -> float:
        """Return when this worker is lost or hung unless it says or does something."""
        if worker.health == "lost":
            return float("inf")
        due = worker.last_heard + self._config.worker_timeout
        if worker.load.busy and worker.health != "hung":
            due = min(due, worker.progress_at + self._config.hung_after)
        return due

    def _watch(self, worker: Worker) -> None:
        self.due = min(self.due, self._due(worker))

    def _objection(self, known: Worker | None, message: WorkerHello) -> DiptychError | None:
        offered = message.compatibility
        others = [w for w in self.by_peer.values() if w is not known and w.health != "lost"]
        if offered.wire_version != WIRE_VERSION or (others and self._differs(offered)):
            return self._mismatch(offered)
        smallest = min(offered.block_size, message.blocks_total, message.max_sequences)
        if smallest < 1 or message.max_model_len < 1:
            return InvalidRequest("block size, pool, sequences and length must be at least 1")
        if known is None and len(others) >= MAX_WORKERS:
            return InvalidRequest(f"the fleet has {MAX_WORKERS} workers already")
        return None

    def _refuse(self, peer: bytes, name: str, error: DiptychError, now: float) -> None:
        known = self.by_peer.get(peer)
        if known is not None:
            self._remove(known, "no longer fits", now)
        text = f"worker {name} refused: {error.message}"
        self._outbox.note(text, warning=True, frequent=True)
        self._outbox.to_peer(peer, WorkerRefused(error=error.payload()))

    def _differs(self, offered: Compatibility) -> bool:
        """Return whether no KV can move between the fleet and a worker that offers this."""
        return self.compatibility is None or bool(self.compatibility.differences(offered))

    def _mismatch(self, offered: Compatibility) -> IncompatiblePeer:
        if self.compatibility is None or offered.wire_version != WIRE_VERSION:
            text = two_versions(WIRE_VERSION, offered.wire_version)
        else:
            text = "; ".join(self.compatibility.differences(offered))
        return IncompatiblePeer(f"the worker does not fit the fleet: {text}")

    def _stopping(self, worker: Worker, stopping: bool) -> None:
        """A worker that was told to end by others; a drain ordered from here looks the same."""
        if stopping == worker.stopping:
            return
        worker.stopping = stopping
        if stopping:
            self._outbox.note(f"worker {worker.hello.worker} is stopping")
        if worker.health in ("ready", "draining"):
            worker.health = "draining" if stopping or worker.drain_ordered else "ready"

    def _lost_its_name(self, peer: bytes, message: WorkerHello) -> bool:
        """Whether this very process was replaced, and by one that lives."""
        former = self._departed.get(peer)
        if former is None or former.incarnation != message.incarnation:
            return False
        return any(
            worker.hello.worker == message.worker and worker.health != "lost"
            for worker in self.by_peer.values()
        )

    def _cancel_abandoned(self, worker: Worker) -> None:
        while worker.abandoned:
            self._outbox.worker(worker, CancelWork(dispatch=worker.abandoned.popleft()))

    def _back(self, worker: Worker) -> None:
        worker.health = "draining" if worker.drain_ordered or worker.stopping else "ready"
        self._introductions.returned(worker)
        self._outbox.note(f"worker {worker.hello.worker} is back")

    def _lose(self, worker: Worker, what: str, now: float) -> None:
        worker.health = "lost"
        self._move_work(worker, what, now, tell=False)
        self._forget_compatibility()

    def _remove(self, worker: Worker, what: str, now: float) -> None:
        worker.health = "lost"
        self._move_work(worker, what, now, tell=False)
        del self.by_peer[worker.peer]
        self._departed[worker.peer] = Departed(worker.hello.incarnation, worker.abandoned)
        if len(self._departed) > MAX_WORKERS:
            self._departed.popitem(last=False)
        self._outbox.effects.append(UnwatchProcess(worker.peer))
        self._forget_compatibility()

    def _move_work(self, worker: Worker, what: str, now: float, *, tell: bool) -> None:
        text = f"worker {worker.hello.worker} {what}"
        self._outbox.note(f"{text}; {len(worker.legs)} dispatches move", warning=True)
        self._recovery.worker_failed(worker, WorkerLost(text).payload(), now, tell=tell)

    def _forget_compatibility(self) -> None:
        if all(worker.health == "lost" for worker in self.by_peer.values()):
            self.compatibility = None

    def _find_lost_dispatches(self, worker: Worker, now: float) -> None:
        error = WorkerLost(f"worker {worker.hello.worker} does not have the dispatch").payload()
        for leg in list(worker.legs.values()):
            gone = not leg.prefilled and now - leg.sent_at > LOST_DISPATCH_AFTER
            if gone and worker.legs.get(leg.dispatch) is leg:
                self._recovery.leg_failed(leg, error, now, tell=True)
