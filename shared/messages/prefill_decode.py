"""Decode (DEALER, connects) <-> prefill (ROUTER, binds): the KV hand-over. No KV bytes here."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from shared.errors import ErrorPayload
from shared.ids import HostId, Incarnation, TransferId, WorkerId
from shared.kv.layout import KvDtype
from shared.messages.fleet import CodecReason, PathRule
from shared.messages.hello import Compatibility
from shared.messages.request import TokenLogprob


class PeerHello(Struct, tag="hello", frozen=True, kw_only=True):
    """First message of a decode worker, compared before anything else.

    ``path`` and ``codec`` are its configuration's, ``codecs`` are those it can decode. Names of
    a later version are no malformed message: they are strings here.
    """

    worker: WorkerId
    incarnation: Incarnation
    host: HostId
    compatibility: Compatibility
    path: str = "auto"
    codec: str = "none"
    codecs: tuple[str, ...] = ()


class OpenTransfer(Struct, tag="open", frozen=True, kw_only=True):
    """Subscribe to a transfer; may come before or after the prefill itself is dispatched.

    ``pipelined``: announce layers while they are computed, else everything at the end.
    """

    transfer: TransferId
    pipelined: bool = True


class Acknowledge(Struct, tag="ack", frozen=True, kw_only=True):
    """All KV copied and verified: the lease may end."""

    transfer: TransferId


class RenewLeases(Struct, tag="renew", frozen=True, kw_only=True):
    """Heartbeat of the reader for every transfer it still needs, in one message."""

    transfers: tuple[TransferId, ...]


class AbortTransfer(Struct, tag="abort", frozen=True, kw_only=True):
    """The reader no longer wants the KV and touches none of it any more."""

    transfer: TransferId


FromDecode = PeerHello | OpenTransfer | Acknowledge | RenewLeases | AbortTransfer


CUDA_HANDLE_BYTES: Final = 64
"""Of a CUDA IPC handle. CuPy takes exactly so many, so a handle of another size is no message."""


class CudaDescriptor(Struct, frozen=True, kw_only=True):
    """A pool in a GPU's memory. ``unit`` is the GPU's UUID, ``size`` that of the allocation.

    ``handle`` is CUDA's for mapping it, None where the GPU exports none. ``sliced``: the GPU is a
    MIG slice. ``layout`` is ``KvLayout.fingerprint()``.
    """

    unit: Annotated[str, Meta(max_length=64)]
    size: int
    layout: Annotated[str, Meta(max_length=64)]
    handle: (
        Annotated[bytes, Meta(min_length=CUDA_HANDLE_BYTES, max_length=CUDA_HANDLE_BYTES)] | None
    ) = None
    sliced: bool = False


class ArenaDescriptor(Struct, frozen=True, kw_only=True):
    """How a peer on the same host maps this worker's pool: ``/proc/<pid>/fd/<fd>``.

    ``dtype`` is that of the KV, None the reader's own. With ``cuda`` the KV is in a GPU's memory,
    and that file holds its id and generations only.
    """

    pid: int
    fd: int
    size: int
    num_blocks: int
    arena_id: int
    dtype: KvDtype | None = None
    cuda: CudaDescriptor | None = None


class NixlDescriptor(Struct, frozen=True, kw_only=True):
    """How a peer reads this worker's pool by NIXL: the agent, and where it has the pool."""

    agent: str
    metadata: bytes
    address: int


class PeerWelcome(Struct, tag="welcome", frozen=True, kw_only=True):
    """The peer fits; here is the arena, and where its bytes can be had without mapping it.

    ``path`` is what both sides' configurations agree on; the reader picks by it, by ``host``
    and by its self-test. ``bulk`` None: no ``host`` path here. ``codec`` is what both sides
    know and allow on that path.
    """

    worker: WorkerId
    incarnation: Incarnation
    arena: ArenaDescriptor
    host: HostId = HostId("")
    bulk: str | None = None
    path: PathRule = "auto"
    codec: str = "none"
    codec_reason: CodecReason = "unknown"
    nixl: NixlDescriptor | None = None


class UnreadWelcome(Struct, tag="welcome", frozen=True, kw_only=True):
    """Stands for a ``PeerWelcome`` of which this version can read no more than who says it."""

    worker: Annotated[str, Meta(max_length=64)]


class PeerRefused(Struct, tag="refused", frozen=True, kw_only=True):
    """The peer does not fit; the sentence lists the differing fields."""

    error: ErrorPayload


class ReadyBlocks(Struct, frozen=True, array_like=True, gc=False):
    """Blocks of a transfer in prompt order, each with the generation its bytes belong to."""

    blocks: tuple[int, ...]
    generations: tuple[int, ...]


class KvReady(Struct, tag="ready", frozen=True, kw_only=True):
    """KV of tokens [``first_token``, ``first_token + num_tokens``) is readable.

    Layers [``first_layer``, ``end_layer``) of it are written. ``table`` covers all blocks of
    the sequence so far and comes with the first message of a chunk only.
    """

    transfer: TransferId
    first_token: int
    num_tokens: int
    first_layer: int
    end_layer: int
    table: ReadyBlocks | None = None


class TransferComplete(Struct, tag="complete", frozen=True, kw_only=True):
    """All KV was announced; the lease runs until acknowledged.

    ``num_tokens`` is the length of the KV (prompt + resumed output). ``first_token_id`` is
    sampled output number ``index``; when it ended the request ``finished`` is set and the
    KV is not needed.
    """

    transfer: TransferId
    num_tokens: int
    index: int
    first_token_id: int
    logprob: TokenLogprob | None = None
    finished: bool = False
    num_cached_tokens: int = 0


class TransferGone(Struct, tag="gone", frozen=True, kw_only=True):
    """The transfer failed, was cancelled, expired, or is unknown here."""

    transfer: TransferId
    error: ErrorPayload


ToDecode = PeerWelcome | PeerRefused | KvReady | TransferComplete | TransferGone
