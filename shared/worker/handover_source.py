"""The prefill side of KV hand-overs: announces what is readable and keeps it under lease."""

from msgspec import Struct

from shared.errors import ErrorPayload
from shared.ids import RequestId, TransferId, WorkerId
from shared.kv.block_pool import BlockPool
from shared.messages.fleet import ReaderStatus
from shared.messages.prefill_decode import (
    KvReady,
    OpenTransfer,
    ReadyBlocks,
    TransferComplete,
    TransferGone,
)
from shared.messages.request import TokenLogprob
from shared.worker.effects import Note, ToReader
from shared.worker.limits import Tally, WorkerLimits
from shared.worker.outbox import Outbox
from shared.worker.sequence import Sequence

_MAX_READERS = 256


class Handover(Struct):
    """One transfer out of this worker. ``told_*``: how far the reader knows of readable KV.

    All layers of tokens [0, ``told_tokens``) were announced, and ``told_layers`` layers of
    the chunk after them. ``pipelined``: the reader is told while it is computed. ``sequence`` is
    there until the prefill is complete; after that the blocks are the lease's and ``deadline`` is
    the lease's end.
    """

    transfer: TransferId
    reader: WorkerId
    sequence: Sequence | None
    request: RequestId
    pipelined: bool
    peer: bytes | None = None
    told_tokens: int = 0
    told_layers: int = 0
    table: ReadyBlocks | None = None
    complete: TransferComplete | None = None
    deadline: float = 0.0
    aborted: bool = False


class Early(Struct, frozen=True):
    """A subscription that came before its prefill, first at ``since``."""

    peer: bytes
    reader: WorkerId
    since: float
    deadline: float
    pipelined: bool


class Gone(Struct, frozen=True):
    """Why a transfer ended, for subscribers that come too late.

    ``reader`` gave it up before it began; whether it was its to give up is known then.
    """

    error: ErrorPayload
    deadline: float
    reader: WorkerId | None = None


class HandoverSource:
    """All transfers out of this worker, those being computed and those held."""

    def __init__(self, pool: BlockPool, limits: WorkerLimits, outbox: Outbox, tally: Tally) -> None:
        self._pool = pool
        self._limits = limits
        self._outbox = outbox
        self._tally = tally
        self._open: dict[TransferId, Handover] = {}
        self._early: dict[TransferId, Early] = {}
        self._gone: dict[TransferId, Gone] = {}
        self._expired: dict[WorkerId, int] = {}

    @property
    def held(self) -> int:
        """Transfers whose prefill is complete and which the reader has not acknowledged."""
        return sum(1 for handover in self._open.values() if handover.complete is not None)

    def __contains__(self, transfer: TransferId) -> bool:
        return transfer in self._open

    def begin(self, sequence: Sequence, reader: WorkerId) -> None:
        """A prefill was accepted; whoever subscribed early is served from now on."""
        transfer = TransferId(sequence.dispatch)
        handover = Handover(
            *(transfer, reader, sequence, sequence.request.request_id),
            pipelined=self._limits.pipeline is not False,
        )
        self._open[transfer] = handover
        early = self._early.pop(transfer, None)
        if early is not None and early.reader != reader:
            self._send_gone(early.peer, transfer, _meant_for(reader))
        elif early is not None:
            handover.peer = early.peer
            handover.pipelined = handover.pipelined and early.pipelined
        handover.aborted = self._over(transfer, reader) is not None
        self._gone.pop(transfer, None)

    def subscribe(self, peer: bytes, reader: WorkerId, message: OpenTransfer, now: float) -> None:
        """A reader asks for a transfer; asking again starts the announcements anew."""
        transfer = message.transfer
        handover = self._open.get(transfer)
        if handover is None:
            gone = self._over(transfer, reader)
            if gone is not None:
                self._send_gone(peer, transfer, gone.error)
            elif len(self._early) >= self._limits.max_open and transfer not in self._early:
                self._send_gone(peer, transfer, _error("too many early subscriptions"))
            else:
                # Asking again is no reason to wait for ever: the prefill may have come and gone.
                lease, before = self._limits.lease, self._early.get(transfer)
                since = now if before is None else before.since
                deadline = min(now + lease, since + 2 * lease)
                self._early[transfer] = Early(peer, reader, since, deadline, message.pipelined)
            return
        if handover.reader != reader:
            self._send_gone(peer, transfer, _meant_for(handover.reader))
            return
        if handover.aborted:
            self._send_gone(peer, transfer, _error("it was given up before"))
            return
        handover.peer = peer
        handover.pipelined = self._limits.pipeline is not False and message.pipelined
        handover.told_tokens = handover.told_layers = 0
        self._catch_up(handover)

    def announces(self, sequence: Sequence) -> bool:
        """Return whether layers of a sequence are to be told while they are computed."""
        handover = self._open.get(TransferId(sequence.dispatch))
        return handover is not None and handover.pipelined

    def layers_written(self, sequence: Sequence, end_token: int, end_layer: int) -> None:
        """The running chunk up to ``end_token`` has its first ``end_layer`` layers written."""
        handover = self._open.get(TransferId(sequence.dispatch))
        if handover is not None and handover.pipelined:
            self._announce(handover, end_token, end_layer)

    def computed(self, sequence: Sequence) -> None:
        """All layers of the sequence's first ``computed`` tokens can be read."""
        handover = self._open.get(TransferId(sequence.dispatch))
        if handover is not None and handover.pipelined:
            self._announce(handover, sequence.computed, self._limits.layers)

    def complete(
        self,
        sequence: Sequence,
        token: tuple[int, TokenLogprob | None],
        *,
        finished: bool,
        now: float,
    ) -> bool:
        """The prefill is over: lease its blocks and tell the reader. False: nobody wants it."""
        handover = self._open[TransferId(sequence.dispatch)]
        if handover.aborted:
            del self._open[handover.transfer]
            return False
        handover.deadline = now + self._limits.lease
        if not finished:
            self._pool.lease(handover.transfer, sequence.blocks, handover.deadline)
            handover.table = self._table(sequence)
        handover.complete = TransferComplete(
            transfer=handover.transfer,
            num_tokens=sequence.computed,
            index=sequence.outputs - 1,
            first_token_id=token[0],
            logprob=token[1],
            finished=finished,
            num_cached_tokens=sequence.num_cached_tokens,
        )
        handover.sequence = None
        self._catch_up(handover)
        return True

    def close(self, transfer: TransferId, error: ErrorPayload, now: float) -> None:
        """End a transfer in any state; its reader learns why, also one that asks later."""
        handover = self._open.pop(transfer, None)
        early = self._early.pop(transfer, None)
        peer = handover.peer if handover is not None else early.peer if early is not None else None
        self._pool.end_lease(transfer)
        self._remember(transfer, error, now)
        if peer is not None and not (handover is not None and handover.aborted):
            self._send_gone(peer, transfer, error)

    def acknowledge(self, peer: bytes, transfer: TransferId) -> bool:
        """The reader has everything. False: not its transfer, or over already."""
        handover = self._open.get(transfer)
        if handover is None or handover.peer != peer or handover.complete is None:
            return False
        self._end(handover)
        return True

    def abort(self, peer: bytes, reader: WorkerId, transfer: TransferId, now: float) -> bool:
        """The reader wants it no more. A running prefill still yields its token."""
        handover = self._open.get(transfer)
        if handover is None:
            early = self._early.get(transfer)
            if early is not None and early.reader != reader:
                return False
            if self._over(transfer, reader) is not None:
                return False
            self._early.pop(transfer, None)
            self._remember(transfer, _error("its reader gave it up"), now, reader)
            return True
        if handover.reader != reader or (handover.peer not in (None, peer)):
            return False
        self._give_up(handover)
        return True

    def renew(self, peer: bytes, transfer: TransferId, now: float) -> bool:
        """The reader is alive and still needs it."""
        handover = self._open.get(transfer)
        if handover is None or handover.peer != peer:
            return False
        if handover.complete is not None:
            handover.deadline = now + self._limits.lease
            self._pool.renew(transfer, handover.deadline)
        return True

    def reader_lost(self, peer: bytes) -> None:
        """Nothing will be read by this peer any more."""
        for handover in list(self._open.values()):
            if handover.peer == peer:
                self._give_up(handover)
        for transfer, early in list(self._early.items()):
            if early.peer == peer:
                del self._early[transfer]

    def expire(self, now: float) -> None:
        """End what nobody renewed and forget what nobody asked for."""
        for handover in list(self._open.values()):
            if handover.complete is not None and handover.deadline <= now:
                self._count_expired(handover.reader)
                self._outbox.add(Note(self._expired_text(handover)))
                self.close(handover.transfer, _error("its lease expired"), now)
        for transfer, early in list(self._early.items()):
            if early.deadline <= now:
                self.close(transfer, _error("its prefill never came"), now)
        for transfer, gone in list(self._gone.items()):
            if gone.deadline <= now:
                del self._gone[transfer]

    def readers(self) -> tuple[ReaderStatus, ...]:
        """Return a line for each reader of which a lease expired."""
        return tuple(ReaderStatus(reader=r, leases_expired=n) for r, n in self._expired.items())

    def close_all(self, error: ErrorPayload, now: float) -> None:
        """End every transfer."""
        for transfer in [*self._open, *self._early]:
            self.close(transfer, error, now)

    def check(self) -> None:
        """Every lease has its held transfer and the reverse. Raises ``AssertionError``."""
        leased = {t for t, h in self._open.items() if h.table is not None and h.complete}
        for transfer in leased:
            assert self._pool.leased(transfer), f"transfer {transfer} is held without a lease"
        if not leased:
            assert self._pool.stats().leased == 0, "a lease outlived its transfer"
        for table in (self._early, self._gone):
            assert len(table) <= self._limits.max_open, "a table of transfers passed its bound"

    def _catch_up(self, handover: Handover) -> None:
        sequence = handover.sequence
        if sequence is not None:
            if handover.pipelined and sequence.computed:
                self._announce(handover, sequence.computed, self._limits.layers)
            return
        if handover.complete is None or handover.peer is None:
            return
        if handover.table is not None:
            self._announce(handover, handover.complete.num_tokens, self._limits.layers)
        self._outbox.add(ToReader(handover.peer, handover.complete))

    def _announce(self, handover: Handover, end_token: int, end_layer: int) -> None:
        """Tell what is new of tokens [0, ``end_token``) in layers [0, ``end_layer``)."""
        if handover.peer is None or handover.aborted or end_token <= handover.told_tokens:
            return
        if end_layer <= handover.told_layers:
            return
        table = None
        if handover.told_layers == 0:
            table = handover.table or self._table(handover.sequence)
        message = KvReady(
            transfer=handover.transfer,
            first_token=handover.told_tokens,
            num_tokens=end_token - handover.told_tokens,
            first_layer=handover.told_layers,
            end_layer=end_layer,
            table=table,
        )
        if end_layer == self._limits.layers:
            handover.told_tokens, handover.told_layers = end_token, 0
        else:
            handover.told_layers = end_layer
        self._outbox.add(ToReader(handover.peer, message))

    def _table(self, sequence: Sequence | None) -> ReadyBlocks:
        blocks = [] if sequence is None else sequence.blocks
        return ReadyBlocks(tuple(blocks), tuple(self._pool.generation(block) for block in blocks))

    def _give_up(self, handover: Handover) -> None:
        if handover.complete is not None:
            self._end(handover)
        else:
            handover.aborted = True
            handover.peer = None

    def _end(self, handover: Handover) -> None:
        del self._open[handover.transfer]
        self._pool.end_lease(handover.transfer)

    def _count_expired(self, reader: WorkerId) -> None:
        self._tally.leases_expired += 1
        count = self._expired.pop(reader, 0)
        while len(self._expired) >= _MAX_READERS:
            del self._expired[next(iter(self._expired))]
        self._expired[reader] = count + 1

    def _expired_text(self, handover: Handover) -> str:
        return (
            f"request {handover.request}: {handover.reader} neither fetched its KV (transfer "
            f"{handover.transfer}) nor renewed the lease for {self._limits.lease:g} s; its blocks "
            "are free again, and whoever still wants them is told"
        )

    def _over(self, transfer: TransferId, reader: WorkerId) -> Gone | None:
        """Return how a transfer ended before it began, if that counts for this reader."""
        gone = self._gone.get(transfer)
        return gone if gone is not None and gone.reader in (None, reader) else None

    def _remember(
        self,
        transfer: TransferId,
        error: ErrorPayload,
        now: float,
        reader: WorkerId | None = None,
    ) -> None:
        while len(self._gone) >= self._limits.max_open:
            del self._gone[next(iter(self._gone))]
        self._gone[transfer] = Gone(error, now + self._limits.lease, reader)

    def _send_gone(self, peer: bytes, transfer: TransferId, error: ErrorPayload) -> None:
        self._outbox.add(ToReader(peer, TransferGone(transfer=transfer, error=error)))


def _meant_for(reader: WorkerId) -> ErrorPayload:
    return _error(f"the KV is meant for {reader}")


def _error(why: str) -> ErrorPayload:
    message = f"the KV hand-over is not available: {why}"
    return ErrorPayload(code="transfer_failed", message=message, retryable=True)
