"""What workers report about themselves and what the router tells about the fleet."""

from typing import Final, Literal

from msgspec import Struct

from shared.ids import Incarnation, WorkerId

Role = Literal["prefill", "decode", "mixed"]
WorkerHealth = Literal["ready", "draining", "hung", "lost"]
PathRule = Literal["auto", "ipc", "host", "nixl"]
KvPath = Literal["ipc", "host", "nixl"]
PathReason = Literal[
    "configured",
    "self_test",
    "other_host",
    "cannot_map",
    "nixl_missing",
    "nixl_failed",
    "mixed_memory",
    "no_peer_access",
    "mig",
]
"""Why a pair uses its path.

Fallbacks: ``cannot_map``, one host, but the self-test failed; ``nixl_missing``, one side lacks
the library or it did not start; ``nixl_failed``, its self-test failed; ``mixed_memory``, one side's
KV is in a GPU's memory and the other's is not; ``no_peer_access``, one GPU cannot reach the other;
``mig``, a GPU is a MIG slice, which shares no memory.
"""
FALLBACKS: Final[frozenset[PathReason]] = frozenset(
    {"cannot_map", "nixl_missing", "nixl_failed", "mixed_memory", "no_peer_access", "mig"}
)
"""Reasons of a path that was not the first choice."""
CodecRule = Literal["none", "int8", "k8v4", "k4v4", "cachegen", "sparse", "auto"]
CodecReason = Literal["configured", "planned", "declined", "unknown", "shared_memory"]
"""Why a pair's KV is encoded as it is. ``planned``: chosen anew for each job by measured rates.

Fallbacks to ``none``: ``declined``, one side is configured so; ``unknown``, one side does not
know the codec; ``shared_memory``, nothing travels.
"""


PipelineRule = bool | Literal["auto"]
PipelineReason = Literal["configured", "measuring", "faster", "not_faster"]
"""Why a pair's newest hand-over was announced while it was computed, or was not.

``faster`` and ``not_faster``: measured by the pair's own hand-overs, of which ``measuring`` has
not seen enough yet.
"""


class WorkerCounters(Struct, frozen=True, kw_only=True):
    """Monotonic since process start. Seconds are floats, the rest are counts.

    ``borrowing_steps`` are those that cores of other workers helped with.
    """

    steps: int = 0
    borrowing_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    failed: int = 0
    transfers_ok: int = 0
    transfers_failed: int = 0
    transfer_bytes: int = 0
    transfer_seconds: float = 0.0
    leases_expired: int = 0
    generation_mismatches: int = 0
    rejected_frames: int = 0
    late_messages: int = 0
    chunks_again: int = 0
    chunks_spoiled: int = 0
    transfer_visible_seconds: float = 0.0


class PairStatus(Struct, frozen=True, kw_only=True):
    """KV that came from ``source`` to this worker by one path since this worker's start.

    A source that changed its path has a line for each, ``former`` but for the newest.
    ``path`` is None for what failed before a self-test had passed. ``chosen``: how often the
    path was, which is once for each life of the source and connection to it. ``seconds`` are
    those of copy jobs added up (they overlap), ``visible_seconds`` those between the end of the
    prefills and the arrival of their KV. ``chunks_again`` had to be asked for more than once,
    ``chunks_spoiled`` did not verify, ``generation_mismatches`` are blocks used anew while they
    were copied. ``bytes`` are those put into the pool, ``wire_bytes`` those that came over a
    socket, in their newest ``codec``. Of the ``transfers`` so many as ``pipelined`` were
    announced while they were computed, and had ``pipelined_visible_seconds`` of the visible ones.
    ``problem``: why no path was found when it was last tried.
    """

    source: WorkerId
    path: KvPath | None = None
    reason: PathReason | None = None
    transfers: int = 0
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    visible_seconds: float = 0.0
    chunks_again: int = 0
    codec: str | None = None
    codec_reason: CodecReason | None = None
    wire_bytes: int = 0
    chosen: int = 0
    chunks_spoiled: int = 0
    generation_mismatches: int = 0
    former: bool = False
    pipelined: int = 0
    pipelined_visible_seconds: float = 0.0
    pipeline_reason: PipelineReason | None = None
    problem: str | None = None


class ReaderStatus(Struct, frozen=True, kw_only=True):
    """What became of KV that this worker held for ``reader``, since this worker's start."""

    reader: WorkerId
    leases_expired: int = 0


class WorkerLoad(Struct, frozen=True, kw_only=True):
    """A worker's state at one moment.

    ``waiting`` sequences have no KV yet, ``receiving`` are pulling it, ``running`` decode,
    ``held`` are prefilled and leased to a decode worker. Blocks obey
    free + cached + leased + active = total.
    """

    waiting: int = 0
    receiving: int = 0
    running: int = 0
    held: int = 0
    pending_prefill_tokens: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_leased: int = 0
    blocks_active: int = 0
    busy: bool = False


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """One worker as the router sees it; ``age`` is seconds since its last message.

    ``drained``: it was emptied on an operator's order and stays so until it is given a role.
    """

    worker: WorkerId
    role: Role
    health: WorkerHealth
    incarnation: Incarnation
    pid: int
    age: float
    load: WorkerLoad
    counters: WorkerCounters
    pairs: tuple[PairStatus, ...] = ()
    drained: bool = False
    readers: tuple[ReaderStatus, ...] = ()


class RouterCounters(Struct, frozen=True, kw_only=True):
    """Monotonic since router start; ``decisions`` counts by reason of the split decision.

    ``violations``: output of workers that was not believed. ``other_versions``: hellos of peers
    that speak another wire version; each was refused.
    """

    accepted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0
    retries: int = 0
    duplicates: int = 0
    late_messages: int = 0
    rejected_frames: int = 0
    violations: int = 0
    other_versions: int = 0
    tokens: int = 0
    decisions: dict[str, int] = {}


class OtherVersion(Struct, frozen=True):
    """A peer that was refused because it is of another release."""

    peer: str
    wire_version: int


class FleetStatus(Struct, frozen=True, kw_only=True):
    """The router's answer to ``diptych status`` and ``/metrics``.

    ``other_version``: who was refused last for another wire version, and which that is.
    """

    incarnation: Incarnation
    uptime: float
    queued: int
    open_requests: int
    draining: bool
    workers: tuple[WorkerStatus, ...]
    counters: RouterCounters
    other_version: OtherVersion | None = None
