"""Who this worker is and what bounds it."""

from msgspec import Struct

from shared.ids import HostId, Incarnation, WorkerId
from shared.messages.fleet import CodecRule, PathRule, PipelineRule, Role, WorkerCounters
from shared.messages.hello import Compatibility
from shared.messages.prefill_decode import ArenaDescriptor, NixlDescriptor


class WorkerIdentity(Struct, frozen=True, kw_only=True):
    """One life of one worker, as told to router and peers."""

    worker: WorkerId
    incarnation: Incarnation
    role: Role
    host: HostId
    pid: int
    kv_endpoint: str
    compatibility: Compatibility
    arena: ArenaDescriptor
    path: PathRule = "auto"
    codec: CodecRule = "none"
    bulk_endpoint: str | None = None
    nixl: NixlDescriptor | None = None


class WorkerLimits(Struct, frozen=True, kw_only=True):
    """Bounds of the scheduler and of every wait, in tokens, sequences and seconds.

    ``layers`` is the number of KV layers of the model. ``max_open`` bounds the table of
    dispatches and each table of transfers. ``pipeline``: have KV announced while it is computed,
    every ``notify_layers`` layers or (None) by ``token_bytes``, each layer's KV of one token.
    ``windows``: how far back each layer's KV is read (``live.storage_windows``), empty for all
    of it everywhere.
    """

    max_batch_tokens: int
    max_sequences: int
    max_model_len: int
    vocab_size: int
    layers: int
    windows: tuple[int | None, ...] = ()
    max_open: int = 4096
    pipeline: PipelineRule = True
    notify_layers: int | None = None
    token_bytes: tuple[int, ...] = ()
    lease: float = 30.0
    heartbeat: float = 5.0
    handshake_timeout: float = 5.0
    drain_timeout: float = 30.0
    router_silence: float = 2.5

    @property
    def widest_window(self) -> int | None:
        """The largest window of all layers that have one."""
        return max((window for window in self.windows if window is not None), default=None)


class Tally(Struct):
    """The running ``WorkerCounters``."""

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

    def snapshot(self) -> WorkerCounters:
        """Return the counters as they are now."""
        return WorkerCounters(**{name: getattr(self, name) for name in self.__struct_fields__})
