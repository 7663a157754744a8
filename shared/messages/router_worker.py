"""Worker (DEALER) <-> router (ROUTER)."""

from msgspec import Struct

from shared.errors import ErrorPayload
from shared.ids import DispatchId, HostId, Incarnation, TransferId, WorkerId
from shared.messages.fleet import PairStatus, ReaderStatus, Role, WorkerCounters, WorkerLoad
from shared.messages.hello import Compatibility
from shared.messages.request import FinishReason, PhaseTimes, Request, TokenLogprob


class WorkerHello(Struct, tag="hello", frozen=True, kw_only=True):
    """First message of a worker, repeated after every reconnect.

    ``kv_endpoint`` is where decode workers reach this worker's KV link. Its token ids are below
    ``vocab_size``; 0 says nothing about them.
    """

    worker: WorkerId
    incarnation: Incarnation
    role: Role
    host: HostId
    pid: int
    kv_endpoint: str
    compatibility: Compatibility
    max_model_len: int
    blocks_total: int
    max_sequences: int
    vocab_size: int = 0


class Report(Struct, tag="report", frozen=True, kw_only=True):
    """Heartbeat, every second and after every change of load that matters to placement.

    ``step`` advances with each finished engine step: busy with a standing ``step`` is hung.
    ``draining``: the worker was told to stop; it finishes what is open, then says ``WorkerBye``.
    New work is answered by a retryable ``SequenceFailed``, so none should be sent.
    """

    step: int
    load: WorkerLoad
    counters: WorkerCounters
    draining: bool = False
    pairs: tuple[PairStatus, ...] = ()
    readers: tuple[ReaderStatus, ...] = ()


class TokenOut(Struct, frozen=True, array_like=True, gc=False):
    """One token; ``index`` counts over the whole output, resumed part included."""

    dispatch: DispatchId
    index: int
    token: int
    logprob: TokenLogprob | None = None


class Prefilled(Struct, frozen=True, kw_only=True):
    """A prefill is complete and its KV is held under lease for the decode worker."""

    dispatch: DispatchId
    num_cached_tokens: int
    times: PhaseTimes
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class SequenceFinished(Struct, frozen=True, kw_only=True):
    """The sequence ended by itself. On a prefill worker: it ended with token 1."""

    dispatch: DispatchId
    reason: FinishReason
    num_cached_tokens: int
    times: PhaseTimes
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class SequenceFailed(Struct, frozen=True, kw_only=True):
    """The sequence cannot go on here; ``error.retryable`` asks for another worker."""

    dispatch: DispatchId
    error: ErrorPayload


class StepOutput(Struct, tag="step", frozen=True, kw_only=True, omit_defaults=True):
    """Everything one engine step (or one event) brought: one message per worker and step."""

    step: int
    tokens: tuple[TokenOut, ...] = ()
    prefilled: tuple[Prefilled, ...] = ()
    finished: tuple[SequenceFinished, ...] = ()
    failed: tuple[SequenceFailed, ...] = ()


class TransferLost(Struct, tag="lost", frozen=True, kw_only=True):
    """Decode could not get the KV of ``transfer`` and waits for another source or a cancel."""

    dispatch: DispatchId
    transfer: TransferId
    error: ErrorPayload


class Drained(Struct, tag="drained", frozen=True, kw_only=True):
    """Answer to ``DrainWorker`` once no request and no lease is left."""


class WorkerBye(Struct, tag="bye", frozen=True, kw_only=True):
    """Orderly exit; whatever is still open here must be placed elsewhere."""


FromWorker = WorkerHello | Report | StepOutput | TransferLost | Drained | WorkerBye


class WorkerWelcome(Struct, tag="welcome", frozen=True, kw_only=True):
    """Answer to ``WorkerHello``. Under a new incarnation the worker drops all earlier work."""

    incarnation: Incarnation


class WorkerRefused(Struct, tag="refused", frozen=True, kw_only=True):
    """The worker does not fit the fleet; it must exit with this sentence."""

    error: ErrorPayload


class KvSource(Struct, frozen=True, kw_only=True):
    """Where the decode worker pulls a transfer from."""

    transfer: TransferId
    worker: WorkerId
    incarnation: Incarnation
    endpoint: str


class Prefill(Struct, tag="prefill", frozen=True, kw_only=True):
    """Compute prompt + output_ids, sample one token, hold the KV for ``decode_worker``."""

    dispatch: DispatchId
    request: Request
    decode_worker: WorkerId


class Expect(Struct, tag="expect", frozen=True, kw_only=True):
    """Reserve blocks, pull the KV from ``source``, then decode. Sent with ``Prefill``."""

    dispatch: DispatchId
    request: Request
    source: KvSource


class NewSource(Struct, tag="source", frozen=True, kw_only=True):
    """The prefill behind ``dispatch`` moved: discard what came and pull from ``source``."""

    dispatch: DispatchId
    source: KvSource


class Run(Struct, tag="run", frozen=True, kw_only=True):
    """Prefill and decode here (colocated). Also replaces a waiting ``Expect`` of ``dispatch``."""

    dispatch: DispatchId
    request: Request


class CancelWork(Struct, tag="cancel", frozen=True, kw_only=True):
    """Stop and free; never answered. Unknown dispatches are ignored and counted."""

    dispatch: DispatchId


class DrainWorker(Struct, tag="drain", frozen=True, kw_only=True):
    """Finish what is open, then answer ``Drained``; nothing new will be sent."""


class SetRole(Struct, tag="role", frozen=True, kw_only=True):
    """Take another role; sent to a drained worker only. Ends the drain."""

    role: Role


class KvPeer(Struct, frozen=True, kw_only=True):
    """A prefill worker of the fleet, and where decode workers reach its KV link."""

    worker: WorkerId
    incarnation: Incarnation
    endpoint: str


class RouterBeat(Struct, tag="beat", frozen=True, kw_only=True, omit_defaults=True):
    """Heartbeat of the router, every second.

    ``sources`` joined, or were back, since the beat before: this worker may be sent there for
    KV, so it settles the path already.
    """

    incarnation: Incarnation
    sources: tuple[KvPeer, ...] = ()


ToWorker = (
    WorkerWelcome
    | WorkerRefused
    | Prefill
    | Expect
    | NewSource
    | Run
    | CancelWork
    | DrainWorker
    | SetRole
    | RouterBeat
)
