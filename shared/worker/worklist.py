"""The open dispatches: taking them in, moving them to another source, ending them once."""

from msgspec import Struct

from shared.errors import ErrorPayload
from shared.ids import DispatchId, TransferId
from shared.messages.request import FinishReason, Request
from shared.messages.router_worker import Expect, NewSource, Prefill, Run
from shared.worker.handover_sink import HandoverSink
from shared.worker.handover_source import HandoverSource
from shared.worker.intake import refusal
from shared.worker.ledger import BlockLedger
from shared.worker.limits import Tally, WorkerLimits
from shared.worker.outbox import Outbox
from shared.worker.scheduler import Scheduler
from shared.worker.sequence import Kind, Sequence
from shared.worker.stepper import Stepper

CANCELLED = ErrorPayload(code="cancelled", message="the request was cancelled")


class Parts(Struct, frozen=True, kw_only=True):
    """The collaborators of one worker's state."""

    ledger: BlockLedger
    outbox: Outbox
    scheduler: Scheduler
    sink: HandoverSink
    source: HandoverSource
    stepper: Stepper
    tally: Tally


class Worklist:
    """Every dispatch that has not ended, and which ended lately (a duplicate is no new one)."""

    def __init__(self, parts: Parts, limits: WorkerLimits) -> None:
        self._parts = parts
        self._limits = limits
        self._ended: dict[DispatchId, None] = {}
        self._last_order = 0
        self.closed_because: ErrorPayload | None = None
        self.open: dict[DispatchId, Sequence] = {}

    def prefill(self, message: Prefill, now: float) -> None:
        """Queue a prompt whose KV goes elsewhere."""
        sequence = self._accept(message.dispatch, message.request, "prefill", now)
        if sequence is not None:
            self._parts.source.begin(sequence, message.decode_worker)
            self._parts.scheduler.enqueue(sequence)

    def expect(self, message: Expect, now: float) -> None:
        """Subscribe to KV from elsewhere; a refusal is told to its source too."""
        sink = self._parts.sink
        if message.source.transfer in sink or message.dispatch in self.open:
            self._parts.tally.late_messages += 1
            return
        sequence = self._accept(message.dispatch, message.request, "expect", now)
        if sequence is None:
            sink.refuse(message.source, now)
        else:
            sink.expect(sequence, message.source, now)

    def new_source(self, message: NewSource, now: float) -> None:
        """Start a pull over; one that has all its KV already needs no other source."""
        sink, sequence = self._parts.sink, self.open.get(message.dispatch)
        if message.source.transfer in sink:
            self._parts.tally.late_messages += 1
        elif sequence is None or sequence.kind != "expect":
            self._parts.tally.late_messages += 1
            sink.refuse(message.source, now)
        else:
            sink.forget(sequence)
            self._parts.scheduler.remove(sequence)
            sequence.phase = "expecting"
            sink.expect(sequence, message.source, now)

    def run(self, message: Run, now: float) -> None:
        """Queue a prompt to compute and decode here, also in place of a waiting ``Expect``."""
        former = self.open.get(message.dispatch)
        if former is not None and former.kind == "expect":
            self.end(former, CANCELLED, now)
            del self._ended[message.dispatch]
        sequence = self._accept(message.dispatch, message.request, "run", now)
        if sequence is not None:
            if former is not None:
                sequence.accepted = former.accepted
            self._parts.scheduler.enqueue(sequence)

    def cancel(self, dispatch: DispatchId, now: float) -> None:
        """End a dispatch or the lease it left behind, without an answer."""
        sequence = self.open.get(dispatch)
        if sequence is not None:
            self.end(sequence, CANCELLED, now)
        elif TransferId(dispatch) in self._parts.source:
            self._parts.source.close(TransferId(dispatch), CANCELLED, now)
        else:
            self._parts.tally.late_messages += 1

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Report the regular end."""
        self._parts.outbox.finished(sequence, reason)
        self.close(sequence)

    def fail(self, sequence: Sequence, error: ErrorPayload, now: float) -> None:
        """Report that the sequence cannot go on."""
        self._parts.outbox.failed(sequence.dispatch, error)
        self.end(sequence, error, now)

    def expire(self, now: float) -> None:
        """Fail what has outlived its time."""
        for sequence in [s for s in self.open.values() if s.deadline <= now]:
            text = "the request's time was up"
            self.fail(sequence, ErrorPayload(code="deadline_exceeded", message=text), now)

    def end(self, sequence: Sequence, why: ErrorPayload, now: float) -> None:
        """End early: the other end of its hand-over learns of it."""
        self._parts.sink.forget(sequence)
        if sequence.kind == "prefill":
            self._parts.source.close(TransferId(sequence.dispatch), why, now)
        self.close(sequence)

    def close(self, sequence: Sequence) -> None:
        """Forget a sequence; blocks a running step writes to are given back after it."""
        del self.open[sequence.dispatch]
        self._remember(sequence.dispatch)
        self._parts.scheduler.remove(sequence)
        self._parts.stepper.close(sequence)
        sequence.phase = "ended"
        if not sequence.in_step:
            self._parts.ledger.release(sequence)

    def drop_all(self, why: ErrorPayload, now: float) -> None:
        """Forget all work without a word to the router, whose later dispatches are all new."""
        for sequence in list(self.open.values()):
            self.end(sequence, why, now)
        self._parts.sink.close_all()
        self._parts.source.close_all(why, now)
        self._ended.clear()

    def _accept(
        self, dispatch: DispatchId, request: Request, kind: Kind, now: float
    ) -> Sequence | None:
        """Open a sequence, or answer why not; a duplicate is ignored."""
        if dispatch in self.open or dispatch in self._ended:
            self._parts.tally.late_messages += 1
            return None
        error = self._refusal(request)
        if error is not None:
            self._parts.outbox.failed(dispatch, error)
            self._turn_away(dispatch, kind, error, now)
            return None
        self._last_order += 1
        sequence = Sequence(dispatch, request, kind, order=self._last_order, now=now)
        reason = sequence.finish_reason(self._limits.max_model_len)
        if reason is not None:  # resumed after its last token: only the end was lost
            self._parts.outbox.finished(sequence, reason)
            self._turn_away(dispatch, kind, CANCELLED, now)
            return None
        self.open[dispatch] = sequence
        return sequence

    def _refusal(self, request: Request) -> ErrorPayload | None:
        if self.closed_because is not None:
            return self.closed_because
        if len(self.open) >= self._limits.max_open:
            text = f"the worker has {self._limits.max_open} open requests"
            return ErrorPayload(code="overloaded", message=text, retryable=True, retry_after=1.0)
        return refusal(request, self._limits, self._parts.ledger)

    def _turn_away(self, dispatch: DispatchId, kind: Kind, error: ErrorPayload, now: float) -> None:
        self._remember(dispatch)
        if kind == "prefill":
            self._parts.source.close(TransferId(dispatch), error, now)

    def _remember(self, dispatch: DispatchId) -> None:
        while len(self._ended) >= self._limits.max_open:
            del self._ended[next(iter(self._ended))]
        self._ended[dispatch] = None
