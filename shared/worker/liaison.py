"""The worker's standing with the router: hello, heartbeat, drain, farewell."""

from shared.ids import Incarnation
from shared.messages.fleet import PairStatus, ReaderStatus, Role, WorkerCounters, WorkerLoad
from shared.messages.router_worker import Drained, Report, WorkerBye, WorkerHello
from shared.worker.effects import Exit, ToRouter
from shared.worker.limits import WorkerIdentity, WorkerLimits
from shared.worker.outbox import Outbox

_REPORT_EVERY = 1.0
_HELLO_FIRST, _HELLO_LAST = 1.0, 8.0


class Liaison:
    """Knows which life of the router this worker belongs to and what it was told last."""

    def __init__(self, identity: WorkerIdentity, limits: WorkerLimits, outbox: Outbox) -> None:
        self._identity = identity
        self._limits = limits
        self._outbox = outbox
        self._router: Incarnation | None = None
        self._heard: float | None = None
        self._hello_at: float | None = None
        self._hello_pause = _HELLO_FIRST
        self._report_at: float | None = None
        self._reported: WorkerLoad | None = None
        self._drain_open = False
        self._drained = False
        self._stop_by: float | None = None
        self.role: Role = identity.role
        self.gone = False

    @property
    def welcomed(self) -> bool:
        """True once a router has taken this worker in."""
        return self._router is not None

    @property
    def stopping(self) -> bool:
        """True once this process was told to end."""
        return self._stop_by is not None

    def heard(self, now: float) -> None:
        """Any message of the router proves that it lives."""
        self._heard = now

    def meet(self, router: Incarnation, now: float, *, welcome: bool) -> bool:
        """Note which router speaks. True: it is another one than before, so all work is void."""
        changed = self._router is not None and self._router != router
        if changed:
            self._drain_open = False
        if welcome:
            self._router = router
            self._hello_at, self._hello_pause = None, _HELLO_FIRST
            self._reported = None
        elif self._router != router:
            self.hello(now)
        return changed

    def hello(self, now: float) -> None:
        """Introduce this worker; ever more rarely while nobody answers."""
        if self._hello_at is not None and now - self._hello_at < self._hello_pause:
            return
        if self._hello_at is not None:
            self._hello_pause = min(self._hello_pause * 2, _HELLO_LAST)
        self._hello_at = now
        identity = self._identity
        self._outbox.add(
            ToRouter(
                WorkerHello(
                    worker=identity.worker,
                    incarnation=identity.incarnation,
                    role=self.role,
                    host=identity.host,
                    pid=identity.pid,
                    kv_endpoint=identity.kv_endpoint,
                    compatibility=identity.compatibility,
                    max_model_len=self._limits.max_model_len,
                    blocks_total=identity.arena.num_blocks,
                    max_sequences=self._limits.max_sequences,
                    vocab_size=self._limits.vocab_size,
                )
            )
        )

    def tick(
        self,
        load: WorkerLoad,
        counters: WorkerCounters,
        pairs: tuple[PairStatus, ...],
        readers: tuple[ReaderStatus, ...],
        step: int,
        now: float,
    ) -> None:
        """Say hello while unknown or unheard, else report when due or when the load changed."""
        silent = self._heard is not None and now - self._heard >= self._limits.router_silence
        if not self.welcomed or silent:
            self.hello(now)
            return
        due = self._report_at is None or now - self._report_at >= _REPORT_EVERY
        if due or load != self._reported:
            self._report_at, self._reported = now, load
            self._outbox.add(
                ToRouter(
                    Report(
                        step=step,
                        load=load,
                        counters=counters,
                        draining=self.stopping,
                        pairs=pairs,
                        readers=readers,
                    )
                )
            )

    def drain(self) -> None:
        """The router wants to know when nothing is left."""
        self._drain_open, self._drained = True, False

    def take_role(self, role: Role, now: float) -> None:
        """Become what the router asks for and introduce this worker anew."""
        self.role = role
        self._drain_open = False
        self._hello_at = None
        self.hello(now)

    def stop(self, now: float) -> None:
        """Begin the bounded drain before the process ends."""
        if self._stop_by is None:
            self._stop_by = now + self._limits.drain_timeout
            self._reported = None

    def overdue(self, now: float) -> bool:
        """Return whether the drain before the end took too long."""
        return self._stop_by is not None and now >= self._stop_by

    def empty(self) -> None:
        """Nothing is open any more: answer the drain, or leave."""
        if self.stopping and not self.gone:
            self.leave()
        elif self._drain_open and not self._drained:
            self._drained = True
            self._outbox.add(ToRouter(Drained()))

    def leave(self) -> None:
        """Say goodbye and end the process."""
        self.gone = True
        if self.welcomed:
            self._outbox.add(ToRouter(WorkerBye()))
        self._outbox.add(Exit())
