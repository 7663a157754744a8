"""The rows of the router's tables. Plain mutable data; the rules live beside them."""

from collections import deque
from typing import Literal

from msgspec import Struct, field

from services.router.prefix_index import PrefixIndex
from shared.ids import DispatchId, GatewayId, Incarnation, RequestId
from shared.kv.hashing import HashChain
from shared.messages.fleet import (
    PairStatus,
    ReaderStatus,
    Role,
    WorkerCounters,
    WorkerHealth,
    WorkerLoad,
)
from shared.messages.gateway_router import TokenItem
from shared.messages.request import PhaseTimes, Request
from shared.messages.router_worker import WorkerHello

LegKind = Literal["prefill", "expect", "run"]
Phase = Literal["admitted", "queued", "prefilling", "receiving", "decoding", "running", "ended"]


class Worker(Struct, eq=False, kw_only=True):
    """One incarnation of a worker.

    ``pending_tokens`` (prompt tokens sent and not yet computed) and ``committed_blocks`` (KV
    blocks its legs hold or will need) are sums over ``legs``. ``progress_at`` is the last
    moment at which it was idle or finished a step. ``abandoned`` are dispatches to cancel
    should a lost worker come back. ``stopping``: it says that it was told to end. ``number``
    grows with each worker that joins or is back; this one was told of sources up to
    ``introduced``.
    """

    peer: bytes
    hello: WorkerHello
    role: Role
    prefix: PrefixIndex
    last_heard: float
    progress_at: float
    health: WorkerHealth = "ready"
    step: int = -1
    load: WorkerLoad = WorkerLoad()
    counters: WorkerCounters = WorkerCounters()
    pairs: tuple[PairStatus, ...] = ()
    readers: tuple[ReaderStatus, ...] = ()
    legs: dict[DispatchId, "Leg"] = field(default_factory=dict)
    pending_tokens: int = 0
    committed_blocks: int = 0
    last_used: int = 0
    abandoned: deque[DispatchId] = field(default_factory=lambda: deque(maxlen=4096))
    stopping: bool = False
    drain_ordered: bool = False
    drained: bool = False
    next_role: Role | None = None
    number: int = 0
    introduced: int = 0


class Gateway(Struct, eq=False, kw_only=True):
    """One incarnation of a gateway and its open requests."""

    peer: bytes
    gateway: GatewayId
    incarnation: Incarnation
    last_heard: float
    requests: dict[RequestId, "OpenRequest"] = field(default_factory=dict)


class Leg(Struct, eq=False, kw_only=True):
    """One dispatch: a phase of a request on a worker.

    ``request`` is what the worker was sent. ``streaming``: a token came from it.
    ``prefilled``: a prefill leg is computed and its KV is held for the decode worker.
    ``source``: the prefill an expect leg pulls from; ``replacement``: a prefill leg that took
    the place of another.
    """

    dispatch: DispatchId
    kind: LegKind
    worker: Worker
    open: "OpenRequest"
    request: Request
    sent_at: float
    pending_tokens: int
    blocks: int
    source: DispatchId | None = None
    streaming: bool = False
    prefilled: bool = False
    replacement: bool = False


class OpenRequest(Struct, eq=False, kw_only=True):
    """An accepted request until its one ``Ended``.

    ``base`` tokens of output came with the request, ``items`` were produced since, ``limit``
    is the most there may be. ``split`` to ``prefill_times`` tell of the attempt that brought
    the first new token, ``decode_worker`` and ``decode_times`` of the last one.
    ``strikes`` counts failed attempts since decoding last came further, ``progress`` is the
    output length when it had, ``avoid`` the routing ids of workers that failed it.
    """

    request: Request
    gateway: Gateway
    received: float
    deadline: float
    base: int
    limit: int
    items: list[TokenItem] = field(default_factory=list)
    phase: Phase = "admitted"
    prefill: Leg | None = None
    decode: Leg | None = None
    chain: HashChain | None = None
    chain_block_size: int = 0
    retries: int = 0
    strikes: int = 0
    progress: int = 0
    not_before: float = 0.0
    avoid: set[bytes] = field(default_factory=set)
    waited_for_prefill: bool = False
    num_cached_tokens: int | None = None
    prompt_logprobs_sent: bool = False
    dispatched: float | None = None
    split: bool = False
    reason: str = ""
    prefill_worker: str | None = None
    decode_worker: str | None = None
    prefill_times: PhaseTimes | None = None
    decode_times: PhaseTimes | None = None

    @property
    def num_output(self) -> int:
        """Output tokens so far, which is also the index of the next one."""
        return self.base + len(self.items)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.request.prompt_ids) + self.base + len(self.items)

    def output_ids(self) -> tuple[int, ...]:
        """Return the output so far, the resumed part included."""
        return (*self.request.output_ids, *(item.token for item in self.items))
