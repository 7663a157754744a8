"""The decode side of KV hand-overs: pulls what is announced and proves it before use."""

from msgspec import Struct

from shared.errors import ErrorPayload
from shared.ids import TransferId, WorkerId
from shared.messages.hello import WIRE_VERSION
from shared.messages.prefill_decode import (
    AbortTransfer,
    Acknowledge,
    KvReady,
    OpenTransfer,
    PeerRefused,
    PeerWelcome,
    ToDecode,
    TransferComplete,
    TransferGone,
    UnreadWelcome,
)
from shared.messages.router_worker import KvPeer, KvSource
from shared.worker.effects import Copy, Note
from shared.worker.events import Copied, CopyFailed, PathChosen, SourceKey
from shared.worker.ledger import BlockLedger, Hold
from shared.worker.limits import Tally, WorkerIdentity, WorkerLimits
from shared.worker.meetings import Meetings
from shared.worker.outbox import Outbox
from shared.worker.pairs import Pairs
from shared.worker.pull import BrokenTransfer, Pull
from shared.worker.sequence import Sequence
from shared.worker.sources import Sources


class Announced(Struct, frozen=True):
    """The source has KV for this sequence: it may queue for blocks."""

    sequence: Sequence


class Arrived(Struct, frozen=True):
    """The hand-over is over; the sequence's blocks are complete unless token 1 finished it."""

    sequence: Sequence
    complete: TransferComplete


class Lost(Struct, frozen=True):
    """The KV will not come from this source; the sequence needs another one."""

    sequence: Sequence
    transfer: TransferId
    source: WorkerId
    error: ErrorPayload


News = Announced | Arrived | Lost


class HandoverSink:
    """All transfers into this worker. ``news`` collects what sequences must be told."""

    def __init__(
        self,
        identity: WorkerIdentity,
        limits: WorkerLimits,
        ledger: BlockLedger,
        outbox: Outbox,
        tally: Tally,
    ) -> None:
        self._limits = limits
        self._ledger = ledger
        self._outbox = outbox
        self._tally = tally
        self._sources = Sources(identity, limits, outbox)
        self._meetings = Meetings()
        self._pulls: dict[TransferId, Pull] = {}
        self._by_sequence: dict[int, Pull] = {}
        self._jobs: dict[int, tuple[Pull, Hold]] = {}
        self._last_job = 0
        self.news: list[News] = []
        self.pairs = Pairs(limits.pipeline)

    def __contains__(self, transfer: TransferId) -> bool:
        return transfer in self._pulls

    def meet(self, peers: tuple[KvPeer, ...], now: float) -> None:
        """Settle the paths to these sources before a request needs one."""
        self._meetings.told(peers)
        self._greet(now)

    def expect(self, sequence: Sequence, source: KvSource, now: float) -> None:
        """Subscribe to the KV of ``sequence``; blocks are asked for once there is some."""
        key = SourceKey(source.worker, source.incarnation)
        self._end_former(key)
        windows = self._limits.windows or (None,) * self._limits.layers
        pull = Pull(sequence, key, source.transfer, windows, now)
        pull.fair = self._sources.settled(key)
        pull.pipelined = self._limits.pipeline is not False
        if pull.fair:
            pull.pipelined = self.pairs.pipelines(key, len(sequence.tokens))
        self._pulls[pull.transfer] = pull
        self._by_sequence[sequence.order] = pull
        self._connect(key, source.endpoint, now)
        if self._sources.ready(key):
            self._sources.send(key, _subscription(pull))

    def reserved(self, sequence: Sequence) -> None:
        """The sequence got its blocks: copy into them whatever is readable."""
        pull = self._by_sequence[sequence.order]
        pull.reserve(Hold(), self._ledger.pool.block_size)
        self._advance(pull)

    def unreserve(self, sequence: Sequence) -> None:
        """Take the blocks back; the announcements stay good, so the pull can start over."""
        pull = self._by_sequence[sequence.order]
        self._ledger.detach(sequence, pull.unreserve())

    def forget(self, sequence: Sequence) -> None:
        """The sequence needs no KV from elsewhere any more: cancel, failure, local prefill."""
        pull = self._by_sequence.get(sequence.order)
        if pull is not None:
            self._drop(pull)
            self._sources.send(pull.source, AbortTransfer(transfer=pull.transfer))

    def refuse(self, source: KvSource, now: float) -> None:
        """Tell a source that nobody here will read this transfer."""
        key = SourceKey(source.worker, source.incarnation)
        if source.transfer not in self._pulls:
            self._connect(key, source.endpoint, now)
            self._sources.send(key, AbortTransfer(transfer=source.transfer))

    def handle(self, key: SourceKey, message: ToDecode | UnreadWelcome, now: float) -> None:
        """Take in what a source says."""
        if key not in self._sources:
            self._tally.late_messages += 1
            return
        self._sources.heard(key, now)
        match message:
            case PeerWelcome():
                self._welcome(key, message, now)
            case PeerRefused():
                self.source_lost(key, message.error)
            case UnreadWelcome() if self._sources.ready(key):
                self._tally.late_messages += 1
            case UnreadWelcome():
                text = (
                    f"{key.worker} answered what this worker (wire_version {WIRE_VERSION}) cannot "
                    "read; install the same release on both sides"
                )
                self.source_lost(key, ErrorPayload(code="incompatible_peer", message=text))
            case KvReady() | TransferComplete() | TransferGone():
                pull = self._pulls.get(message.transfer)
                if pull is None or pull.source != key:
                    self._tally.late_messages += 1
                    return
                pull.progress = now
                self._transfer(pull, message)

    def copied(self, event: Copied | CopyFailed, now: float) -> None:
        """A copy job is over."""
        pull, hold = self._jobs.pop(event.job)
        live = pull.hold is hold
        self._ledger.job_over(hold)
        self.pairs.copied(pull.source, event)
        self._tally.chunks_again += event.again
        if isinstance(event, CopyFailed):
            self._tally.generation_mismatches += event.reused
            if live:
                self._lose(pull, event.error)
            return
        self._tally.transfer_bytes += event.bytes
        self._tally.transfer_seconds += event.seconds
        if live:
            pull.progress = now
            self._advance(pull)

    def path_chosen(self, event: PathChosen) -> None:
        """Note by which path a source's KV comes."""
        if event.source in self._sources:
            self._sources.settle(event.source)
            self.pairs.chosen(event)

    def source_lost(self, key: SourceKey, error: ErrorPayload) -> None:
        """The source is gone and with it everything not copied yet."""
        lost = [p for p in self._pulls.values() if p.source == key]
        if key in self._sources and not self._sources.settled(key):
            self.pairs.pathless(key, error.message)
            if not lost:
                text = f"no path for KV of {key.worker}: {error.code}: {error.message}"
                self._outbox.add(Note(text))
        self._sources.drop(key)
        for pull in lost:
            self._lose(pull, error)

    def tick(self, now: float) -> None:
        """Watch deadlines and keep leases alive."""
        for key in self._sources.late(now):
            seconds = self._limits.handshake_timeout
            self.source_lost(key, _error(f"{key.worker} did not answer in {seconds:g} s"))
        for pull in list(self._pulls.values()):
            if pull.needs_source and now - pull.progress >= self._limits.lease:
                self._lose(pull, _error(f"{pull.source.worker} made no progress"))
        for key in self._sources.connected():
            mine = [p for p in self._pulls.values() if p.source == key]
            needed = [p.transfer for p in mine]
            unheard = [_subscription(p) for p in mine if not p.announced]
            self._sources.renew(key, needed, unheard, now)
        self._greet(now)

    def close_all(self) -> None:
        """Abort every pull."""
        for pull in list(self._pulls.values()):
            self.forget(pull.sequence)

    def check(self) -> None:
        """Both indexes and the jobs agree. Raises ``AssertionError``."""
        assert sorted(id(p) for p in self._pulls.values()) == sorted(
            id(p) for p in self._by_sequence.values()
        ), "the two indexes of pulls differ"
        for pull in self._pulls.values():
            phase = pull.sequence.phase
            assert pull.reserved == (phase == "receiving"), f"a pull is reserved while {phase}"
            assert pull.source in self._sources, "a pull has no source"
        jobs: dict[int, int] = {}
        for _, hold in self._jobs.values():
            jobs[id(hold)] = jobs.get(id(hold), 0) + 1
        holds = [p.hold for p in self._pulls.values() if p.hold is not None]
        for hold in [*holds, *self._ledger.held]:
            assert hold.jobs == jobs.pop(id(hold), 0), "copy jobs are miscounted"
        assert not jobs, "a copy job writes to blocks that nobody holds"

    def _greet(self, now: float) -> None:
        """Connect whoever's turn it is; a path is settled by its self-test alone."""
        for key, endpoint in self._meetings.next(self._sources.unsettled):
            self._end_former(key)
            self._connect(key, endpoint, now)

    def _end_former(self, key: SourceKey) -> None:
        for former in self._sources.former_lives(key):
            self.source_lost(former, _error(f"{key.worker} was restarted"))

    def _connect(self, key: SourceKey, endpoint: str, now: float) -> None:
        self._meetings.met(key.worker)
        self._sources.connect(key, endpoint, now, {p.source for p in self._pulls.values()})

    def _welcome(self, key: SourceKey, message: PeerWelcome, now: float) -> None:
        error = self._sources.welcome(key, message)
        if error is not None:
            self.source_lost(key, error)
            return
        for pull in self._pulls.values():
            if pull.source == key and not pull.announced:
                pull.progress = now
                self._sources.send(key, _subscription(pull))

    def _transfer(self, pull: Pull, message: KvReady | TransferComplete | TransferGone) -> None:
        heard = pull.announced
        try:
            match message:
                case KvReady():
                    pull.announce(message)
                case TransferComplete():
                    if not 0 <= message.first_token_id < self._limits.vocab_size:
                        raise BrokenTransfer(f"token {message.first_token_id}, which is none")
                    pull.finish(message)
                    pull.completed = pull.progress
                case TransferGone():
                    self._lose(pull, message.error, gone=True)
                    return
        except BrokenTransfer as error:
            self._lose(pull, _error(f"{pull.source.worker} announced {error}"))
            return
        if pull.complete is not None and pull.complete.finished:
            self._end(pull)
            return
        if not heard:
            self.news.append(Announced(pull.sequence))
        self._advance(pull)

    def _advance(self, pull: Pull) -> None:
        """Ask for every copy that is possible; end the pull when all is there."""
        if pull.hold is None:
            return
        try:
            spans = pull.ready_spans()
        except BrokenTransfer as error:
            self._lose(pull, _error(f"{pull.source.worker} announced {error}"))
            return
        for span in spans:
            blocks = slice(span.first_block, span.end_block)
            self._last_job += 1
            self._jobs[self._last_job] = (pull, pull.hold)
            pull.hold.jobs += 1
            self._outbox.add(
                Copy(
                    job=self._last_job,
                    source=pull.source,
                    first_layer=span.first_layer,
                    end_layer=span.end_layer,
                    source_blocks=pull.table.blocks[blocks],
                    generations=pull.table.generations[blocks],
                    target_blocks=tuple(pull.sequence.blocks[blocks]),
                    tokens=pull.tokens_of(span),
                )
            )
        if pull.arrived:
            visible = max(0.0, pull.progress - pull.completed)
            self._tally.transfers_ok += 1
            self._tally.transfer_visible_seconds += visible
            self.pairs.arrived(
                *(pull.source, visible),
                tokens=len(pull.sequence.tokens),
                pipelined=pull.pipelined,
                fair=pull.fair,
            )
            pull.sequence.computed = len(pull.sequence.tokens)
            pull.sequence.whole_from = pull.whole_from
            pull.hold = None
            self._end(pull)

    def _end(self, pull: Pull) -> None:
        assert pull.complete is not None
        self._sources.send(pull.source, Acknowledge(transfer=pull.transfer))
        self._drop(pull)
        self.news.append(Arrived(pull.sequence, pull.complete))

    def _lose(self, pull: Pull, error: ErrorPayload, *, gone: bool = False) -> None:
        self._tally.transfers_failed += 1
        self.pairs.failed(pull.source)
        self._drop(pull)
        if not gone:
            self._sources.send(pull.source, AbortTransfer(transfer=pull.transfer))
        self.news.append(Lost(pull.sequence, pull.transfer, pull.source.worker, error))

    def _drop(self, pull: Pull) -> None:
        del self._pulls[pull.transfer]
        del self._by_sequence[pull.sequence.order]
        if pull.hold is not None:
            self._ledger.detach(pull.sequence, pull.unreserve())


def _subscription(pull: Pull) -> OpenTransfer:
    return OpenTransfer(transfer=pull.transfer, pipelined=pull.pipelined)


def _error(why: str) -> ErrorPayload:
    return ErrorPayload(
        code="transfer_failed", message=f"the KV did not arrive: {why}", retryable=True
    )
