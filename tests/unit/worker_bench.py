"""One worker state on the bench: messages in, effects out, tokens made up by the test."""

from typing import TypeVar

import msgspec

from shared.engine.batch import Sampled, StepResult
from shared.errors import ErrorPayload
from shared.ids import DispatchId, HostId, Incarnation, RequestId, TenantId, TransferId, WorkerId
from shared.kv.block_pool import BlockPool
from shared.messages.fleet import WorkerCounters
from shared.messages.hello import Compatibility
from shared.messages.prefill_decode import (
    ArenaDescriptor,
    FromDecode,
    KvReady,
    PeerHello,
    PeerWelcome,
    ReadyBlocks,
    ToDecode,
    TransferComplete,
)
from shared.messages.request import Request, Sampling
from shared.messages.router_worker import (
    CancelWork,
    Expect,
    FromWorker,
    KvSource,
    Prefill,
    Report,
    RouterBeat,
    Run,
    SequenceFailed,
    SequenceFinished,
    StepOutput,
    ToWorker,
    WorkerWelcome,
)
from shared.worker.effects import Copy, Effect, RunStep, ToReader, ToRouter, ToSource
from shared.worker.events import (
    Copied,
    Event,
    ReaderSaid,
    RouterSaid,
    SourceKey,
    SourceSaid,
    StepDone,
    Tick,
)
from shared.worker.limits import WorkerIdentity, WorkerLimits
from shared.worker.state import WorkerState

Wanted = TypeVar("Wanted")

BLOCK = 4
LAYERS = 2
COMPATIBILITY = Compatibility(model="m", kv_dtype="bf16", block_size=BLOCK, layout="l")
READER = b"decode-9#5"
SOURCE = SourceKey(WorkerId("prefill-9"), Incarnation(44))
ARENA = ArenaDescriptor(pid=1, fd=3, size=4096, num_blocks=64, arena_id=8)
LIMITS = WorkerLimits(
    max_batch_tokens=8,
    max_sequences=4,
    max_model_len=64,
    vocab_size=1000,
    layers=LAYERS,
    max_open=8,
    lease=30.0,
    heartbeat=5.0,
    drain_timeout=20.0,
)
IDENTITY = WorkerIdentity(
    worker=WorkerId("worker-0"),
    incarnation=Incarnation(11),
    role="mixed",
    host=HostId("here"),
    pid=1,
    kv_endpoint="ipc:///tmp/kv",
    compatibility=COMPATIBILITY,
    arena=ARENA,
)
HELLO = PeerHello(
    worker=WorkerId("decode-9"),
    incarnation=Incarnation(5),
    host=HostId("here"),
    compatibility=COMPATIBILITY,
)


def request(prompt: int | tuple[int, ...], max_tokens: int = 8, **sampling: object) -> Request:
    """Return a request; a number stands for a prompt of that length."""
    ids = tuple(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    return Request(
        request_id=RequestId("r"),
        tenant=TenantId(""),
        prompt_ids=ids,
        sampling=Sampling(seed=0, max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        ttl=1000.0,
    )


class Bench:
    """Feeds events at a time the test sets, checks invariants, remembers effects."""

    def __init__(
        self, blocks: int = 16, identity: WorkerIdentity = IDENTITY, **limits: object
    ) -> None:
        self.pool = BlockPool(blocks, BLOCK)
        self.state = WorkerState(identity, msgspec.structs.replace(LIMITS, **limits), self.pool)
        self.now = 0.0
        self.effects: list[Effect] = []
        self.running: RunStep | None = None
        self.said(WorkerWelcome(incarnation=Incarnation(1)))

    def event(self, event: Event) -> list[Effect]:
        """Handle one event."""
        self.effects = self.state.handle(event, self.now)
        self.state.check()
        for effect in self.effects:
            if isinstance(effect, RunStep):
                assert self.running is None, "two steps in flight"
                self.running = effect
        return self.effects

    def said(self, message: ToWorker) -> list[Effect]:
        """The router says something."""
        return self.event(RouterSaid(message))

    def run(self, number: int, work: Request) -> list[Effect]:
        """Dispatch ``Run``."""
        return self.said(Run(dispatch=DispatchId(number), request=work))

    def prefill(self, number: int, work: Request) -> list[Effect]:
        """Dispatch ``Prefill`` for the reader decode-9."""
        return self.said(
            Prefill(dispatch=DispatchId(number), request=work, decode_worker=HELLO.worker)
        )

    def expect(self, number: int, work: Request, transfer: int = 70) -> list[Effect]:
        """Dispatch ``Expect`` with the KV at ``SOURCE``."""
        return self.said(
            Expect(dispatch=DispatchId(number), request=work, source=kv_source(transfer))
        )

    def cancel(self, number: int) -> list[Effect]:
        """Cancel a dispatch."""
        return self.said(CancelWork(dispatch=DispatchId(number)))

    def reader(self, message: FromDecode, peer: bytes = READER) -> list[Effect]:
        """A decode worker says something."""
        return self.event(ReaderSaid(peer, message))

    def source(self, message: ToDecode, key: SourceKey = SOURCE) -> list[Effect]:
        """The prefill worker says something."""
        return self.event(SourceSaid(key, message))

    def welcome(self) -> list[Effect]:
        """The prefill worker welcomes this one."""
        return self.source(
            PeerWelcome(worker=SOURCE.worker, incarnation=SOURCE.incarnation, arena=ARENA)
        )

    def ready(self, tokens: int, layers: int = LAYERS, transfer: int = 70) -> list[Effect]:
        """The first ``tokens`` tokens are readable in the first ``layers`` layers."""
        blocks = tuple(range(20, 20 + -(-tokens // BLOCK)))
        return self.source(
            KvReady(
                transfer=TransferId(transfer),
                first_token=0,
                num_tokens=tokens,
                first_layer=0,
                end_layer=layers,
                table=ReadyBlocks(blocks, tuple(1 for _ in blocks)),
            )
        )

    def complete(self, tokens: int, token: int = 5, transfer: int = 70) -> list[Effect]:
        """The prefill of ``tokens`` tokens is over and ``token`` was sampled."""
        return self.source(complete(tokens, token, transfer))

    def copied(self) -> None:
        """Every copy job asked for by the last event is done."""
        for job in self.all(Copy):
            self.event(Copied(job.job, 1, 0.0))

    def step(self, token: int = 50) -> list[Effect]:
        """The running step ends and every sampling sequence gets ``token``."""
        assert self.running is not None, "no step is running"
        step, self.running = self.running, None
        sampled = tuple(Sampled(item.key, token) for item in step.batch.sequences if item.sample)
        return self.event(StepDone(step.step, StepResult(sampled=sampled), self.now))

    def steps(self, count: int, token: int = 50) -> None:
        """Run so many steps."""
        for _ in range(count):
            self.step(token)

    def tick(self, seconds: float) -> list[Effect]:
        """Let time pass."""
        self.now += seconds
        return self.event(Tick())

    def all(self, kind: type[Wanted]) -> list[Wanted]:
        """Return the last event's effects of one kind."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def work(self) -> list[tuple[int, int, bool]]:
        """Return (start, tokens, sample) of each sequence of the running step."""
        assert self.running is not None
        return [(s.start, len(s.tokens), s.sample) for s in self.running.batch.sequences]

    def to_router(self) -> list[FromWorker]:
        """Return the last event's messages to the router, reports left out."""
        messages = [effect.message for effect in self.all(ToRouter)]
        return [m for m in messages if not isinstance(m, Report)]

    def output(self) -> StepOutput:
        """Return the one output message of the last event."""
        (message,) = [m for m in self.to_router() if isinstance(m, StepOutput)]
        return message

    def finished(self) -> SequenceFinished:
        """Return the one sequence that the last event finished."""
        (item,) = self.output().finished
        return item

    def failed(self) -> SequenceFailed:
        """Return the one sequence that the last event failed."""
        (item,) = self.output().failed
        return item

    def to_reader(self) -> list[ToDecode]:
        """Return the last event's messages to decode workers."""
        return [effect.message for effect in self.all(ToReader)]

    def to_source(self) -> list[FromDecode]:
        """Return the last event's messages to prefill workers."""
        return [effect.message for effect in self.all(ToSource)]

    def counters(self) -> WorkerCounters:
        """Return the counters the worker reports next."""
        return self.report().counters

    def report(self) -> Report:
        """Return what the worker reports next."""
        self.said(RouterBeat(incarnation=Incarnation(1)))
        self.tick(1.0)
        (report,) = [e.message for e in self.all(ToRouter) if isinstance(e.message, Report)]
        return report

    def empty(self) -> bool:
        """Return whether no block is owned by anybody."""
        stats = self.pool.stats()
        return stats.free + stats.cached == stats.total


def kv_source(transfer: int, key: SourceKey = SOURCE) -> KvSource:
    """Return where the KV of a transfer is."""
    return KvSource(
        transfer=TransferId(transfer),
        worker=key.worker,
        incarnation=key.incarnation,
        endpoint="ipc:///tmp/kv-prefill-9",
    )


def complete(tokens: int, token: int = 5, transfer: int = 70) -> TransferComplete:
    """Return the end of a hand-over of ``tokens`` tokens."""
    return TransferComplete(
        transfer=TransferId(transfer), num_tokens=tokens, index=0, first_token_id=token
    )


def error(code: str = "internal") -> ErrorPayload:
    """Return an error of that code."""
    return ErrorPayload(code=code, message="made up")  # type: ignore[arg-type]
