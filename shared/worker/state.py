"""The worker's state machine: events in, effects out; no clock, no socket, no tensor.

One core serves all roles; which phase a request goes through is said by the message that
brings it (``Prefill``, ``Expect`` or ``Run``).
"""

from shared.errors import ErrorPayload
from shared.kv.block_pool import BlockPool
from shared.messages.fleet import Role, WorkerLoad
from shared.messages.router_worker import (
    CancelWork,
    DrainWorker,
    Expect,
    NewSource,
    Prefill,
    RouterBeat,
    Run,
    SetRole,
    ToWorker,
    TransferLost,
    WorkerRefused,
    WorkerWelcome,
)
from shared.worker.effects import Effect, Exit, Note, RunStep, ToRouter
from shared.worker.events import (
    Copied,
    CopyFailed,
    Event,
    LayersWritten,
    PathChosen,
    ReaderLost,
    ReaderSaid,
    RouterSaid,
    SourceLost,
    SourceSaid,
    StepDone,
    StepFailed,
    StopRequested,
    Tick,
)
from shared.worker.handover_sink import Announced, Arrived, HandoverSink, Lost
from shared.worker.handover_source import HandoverSource
from shared.worker.ledger import BlockLedger
from shared.worker.liaison import Liaison
from shared.worker.limits import Tally, WorkerIdentity, WorkerLimits
from shared.worker.outbox import Outbox
from shared.worker.pipelining import announced_layers
from shared.worker.pool_size import never_fits
from shared.worker.readers import Readers
from shared.worker.scheduler import Chunk, Scheduler
from shared.worker.sequence import Sequence
from shared.worker.stepper import Advanced, Stepper
from shared.worker.worklist import Parts, Worklist

_LEAVING = ErrorPayload(code="worker_lost", message="the worker is leaving", retryable=True)
_NEW_ROUTER = ErrorPayload(code="cancelled", message="the router was restarted", retryable=True)


class WorkerState:
    """Everything one worker knows. ``check`` recomputes its invariants."""

    def __init__(self, identity: WorkerIdentity, limits: WorkerLimits, pool: BlockPool) -> None:
        self._limits = limits
        self._pool = pool
        self._tally = tally = Tally()
        self._outbox = outbox = Outbox(tally)
        self._ledger = ledger = BlockLedger(pool, limits.widest_window)
        self._source = HandoverSource(pool, limits, outbox, tally)
        self._sink = HandoverSink(identity, limits, ledger, outbox, tally)
        self._scheduler = Scheduler(ledger, limits, tally, self._sink.unreserve)
        self._stepper = Stepper(ledger, tally)
        self._liaison = Liaison(identity, limits, outbox)
        self._readers = Readers(identity, self._source, outbox, tally)
        parts = Parts(
            ledger=ledger,
            outbox=outbox,
            scheduler=self._scheduler,
            sink=self._sink,
            source=self._source,
            stepper=self._stepper,
            tally=tally,
        )
        self._work = Worklist(parts, limits)

    @property
    def welcomed(self) -> bool:
        """True once a router has taken this worker in."""
        return self._liaison.welcomed

    @property
    def role(self) -> Role:
        """The role the router knows this worker under."""
        return self._liaison.role

    @property
    def idle(self) -> bool:
        """True when no sequence, held transfer, step or copy is open."""
        return not (self._work.open or self._source.held or self._stepper.busy or self._ledger.held)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event in and return what is to be done, in this order."""
        self._take_in(event, now)
        self._digest(now)
        effects: list[Effect] = []
        if not self._stepper.busy and not self._liaison.gone:
            effects = self._plan(now)
        if self.idle:
            self._liaison.empty()
        return effects + self._outbox.take(self._stepper.step)

    def load(self) -> WorkerLoad:
        """Return what the router is told about this moment."""
        stats = self._pool.stats()
        unplaced = ("waiting", "expecting", "lost")
        return WorkerLoad(
            waiting=sum(1 for s in self._work.open.values() if s.phase in unplaced),
            receiving=len(self._scheduler.receiving),
            running=len(self._scheduler.running),
            held=self._source.held,
            pending_prefill_tokens=self._scheduler.pending_prefill(),
            blocks_total=stats.total,
            blocks_free=stats.free,
            blocks_cached=stats.cached,
            blocks_leased=stats.leased,
            blocks_active=stats.active,
            busy=self._stepper.busy,
        )

    def check(self) -> None:
        """Recompute who owns what. Raises ``AssertionError``."""
        self._pool.check()
        self._source.check()
        self._sink.check()
        self._scheduler.check(list(self._work.open.values()))
        ended = [c.sequence for c in self._stepper.chunks if c.sequence.phase == "ended"]
        owned = {block for s in [*self._work.open.values(), *ended] for block in s.blocks}
        owned |= {block for hold in self._ledger.held for block in hold.blocks}
        stats = self._pool.stats()
        assert stats.active == len(owned), "a block is active without an owner"
        if self.idle:
            assert stats.free + stats.cached == stats.total, "blocks are held at idle"

    def _take_in(self, event: Event, now: float) -> None:
        match event:
            case RouterSaid():
                self._liaison.heard(now)
                self._router_said(event.message, now)
            case ReaderSaid():
                self._readers.said(event.peer, event.message, now)
            case ReaderLost():
                self._readers.lost(event.peer)
            case SourceSaid():
                self._sink.handle(event.source, event.message, now)
            case SourceLost():
                self._sink.source_lost(event.source, event.error)
            case PathChosen():
                self._sink.path_chosen(event)
            case LayersWritten():
                self._layers_written(event)
            case StepDone():
                self._tally.borrowing_steps += event.lent > 0
                for advanced in self._stepper.finish(event.result):
                    self._advanced(advanced, event.at, now)
            case StepFailed():
                for sequence in self._stepper.abandon():
                    self._work.fail(sequence, event.error, now)
            case Copied() | CopyFailed():
                self._sink.copied(event, now)
            case StopRequested():
                self._liaison.stop(now)
                self._work.closed_because = _LEAVING
            case Tick():
                self._tick(event, now)

    def _router_said(self, message: ToWorker, now: float) -> None:
        match message:
            case WorkerWelcome() | RouterBeat():
                welcome = isinstance(message, WorkerWelcome)
                if self._liaison.meet(message.incarnation, now, welcome=welcome):
                    self._work.drop_all(_NEW_ROUTER, now)
                if isinstance(message, RouterBeat):
                    self._sink.meet(message.sources, now)
            case WorkerRefused():
                self._liaison.gone = True
                self._outbox.add(Exit(message.error.message, refused=True))
            case Prefill():
                self._work.prefill(message, now)
            case Expect():
                self._work.expect(message, now)
            case NewSource():
                self._work.new_source(message, now)
            case Run():
                self._work.run(message, now)
            case CancelWork():
                self._work.cancel(message.dispatch, now)
            case DrainWorker():
                self._liaison.drain()
            case SetRole():
                self._liaison.take_role(message.role, now)

    def _layers_written(self, event: LayersWritten) -> None:
        if event.step != self._stepper.step:
            return
        for chunk in self._stepper.chunks:
            if chunk.sequence.kind == "prefill" and chunk.sequence.phase == "running":
                end = chunk.start + chunk.count
                self._source.layers_written(chunk.sequence, end, event.end_layer)

    def _advanced(self, advanced: Advanced, at: float, now: float) -> None:
        sequence, sampled = advanced.sequence, advanced.sampled
        if advanced.error is not None:
            self._work.fail(sequence, advanced.error, now)
            return
        if sampled is None:
            if sequence.kind == "prefill":
                self._source.computed(sequence)
            return
        index = sequence.sampled(sampled.token, at)
        self._tally.output_tokens += 1
        self._outbox.token(sequence.dispatch, index, sampled.token, sampled.logprob)
        reason = sequence.finish_reason(self._limits.max_model_len)
        if sequence.kind == "prefill":
            token = (sampled.token, sampled.logprob)
            self._source.complete(sequence, token, finished=reason is not None, now=now)
        if reason is not None:
            self._work.finish(sequence, reason)
        elif sequence.kind == "prefill":
            self._outbox.prefilled(sequence)
            self._work.close(sequence)

    def _tick(self, event: Tick, now: float) -> None:
        self._tally.rejected_frames = event.rejected_frames
        self._tally.chunks_spoiled = event.chunks_spoiled
        self._work.expire(now)
        self._source.expire(now)
        self._sink.tick(now)
        if self._liaison.gone:
            return
        if self._liaison.overdue(now):
            self._work.drop_all(_LEAVING, now)
            self._liaison.leave()
        else:
            spent = self._tally.snapshot()
            pairs = self._sink.pairs.snapshot()
            readers = self._source.readers()
            self._liaison.tick(self.load(), spent, pairs, readers, self._stepper.step, now)

    def _digest(self, now: float) -> None:
        """Act on what the hand-overs brought, until they bring nothing more."""
        while self._sink.news:
            news, self._sink.news = self._sink.news, []
            for item in news:
                sequence = item.sequence
                match item:
                    case Announced() if sequence.phase == "expecting":
                        self._scheduler.enqueue(sequence)
                    case Arrived() if sequence.phase != "ended":
                        self._arrived(item, now)
                    case Lost() if sequence.phase != "ended":
                        self._lost(item)
            self._admit(compute=False)

    def _admit(self, *, compute: bool) -> None:
        for sequence in self._scheduler.admit(compute=compute):
            self._sink.reserved(sequence)

    def _arrived(self, item: Arrived, now: float) -> None:
        """Join the batch with the token that came along; the router hears of it here too."""
        sequence, complete = item.sequence, item.complete
        sequence.cached = complete.num_cached_tokens
        sequence.transferred = now
        sequence.tokens.append(complete.first_token_id)
        self._outbox.token(
            sequence.dispatch, complete.index, complete.first_token_id, complete.logprob
        )
        reason = sequence.finish_reason(self._limits.max_model_len)
        if reason is None and not complete.finished:
            sequence.kind = "run"
            self._scheduler.start(sequence)
            self._ledger.seal(sequence)
            return
        sequence.finished = now
        self._work.finish(sequence, reason or "length")

    def _lost(self, item: Lost) -> None:
        sequence = item.sequence
        self._scheduler.remove(sequence)
        sequence.phase = "lost"
        message = TransferLost(dispatch=sequence.dispatch, transfer=item.transfer, error=item.error)
        self._outbox.add(ToRouter(message))
        self._outbox.add(
            Note(
                f"request {sequence.request.request_id}: its KV (transfer {item.transfer}) from "
                f"{item.source} is lost: {item.error.code}: {item.error.message}; the router is "
                "asked for another source"
            )
        )

    def _plan(self, now: float) -> list[Effect]:
        """Start the next step if there is anything to compute."""
        while True:
            self._admit(compute=True)
            self._digest(now)
            chunks = self._scheduler.compose()
            exhausted, self._scheduler.exhausted = self._scheduler.exhausted, []
            preempted, self._scheduler.preempted = self._scheduler.preempted, []
            for sequence in preempted:
                self._outbox.add(Note(self._preempted(sequence)))
            if not exhausted:
                break
            for sequence in exhausted:
                self._work.fail(sequence, self._too_long(sequence), now)
        if not chunks:
            return []
        for sequence in [c.sequence for c in chunks]:
            if sequence.started is None and sequence.transferred is None:
                self._tally.cached_tokens += sequence.num_cached_tokens
        batch = self._stepper.begin(chunks, now)
        prefills = [c.sequence for c in chunks if c.sequence.kind == "prefill"]
        for sequence in prefills:
            self._source.computed(sequence)
        return [RunStep(self._stepper.step, batch, self._announcements(chunks))]

    def _announcements(self, chunks: list[Chunk]) -> tuple[int, ...]:
        """Return after which layers of the step readers hear of it: as the longest chunk asks."""
        told = [c.count for c in chunks if self._source.announces(c.sequence)]
        if not told:
            return ()
        limits = self._limits
        sizes = limits.token_bytes or (0,) * limits.layers
        return announced_layers(sizes, max(told), limits.notify_layers)

    def _preempted(self, sequence: Sequence) -> str:
        then = "fetched" if sequence.kind == "expect" else "computed"
        request, tokens = sequence.request.request_id, len(sequence.tokens)
        return (
            f"request {request}: preempted after {tokens} tokens, because all "
            f"{self._pool.num_blocks} KV blocks are taken; its KV is {then} again"
        )

    def _too_long(self, sequence: Sequence) -> ErrorPayload:
        text = never_fits(len(sequence.tokens), self._pool)
        return ErrorPayload(code="invalid_request", message=text, param="max_tokens")
