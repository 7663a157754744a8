"""What can happen to a worker. Failures of network, peers and engine are events too."""

from msgspec import Struct

from shared.engine.batch import StepResult
from shared.errors import ErrorPayload
from shared.ids import Incarnation, WorkerId
from shared.messages.fleet import CodecReason, KvPath, PathReason
from shared.messages.hello import UnreadHello
from shared.messages.prefill_decode import FromDecode, ToDecode, UnreadWelcome
from shared.messages.router_worker import ToWorker


class SourceKey(Struct, frozen=True):
    """One life of a prefill worker: a restarted one is another source."""

    worker: WorkerId
    incarnation: Incarnation


class RouterSaid(Struct, frozen=True):
    """A message of the router."""

    message: ToWorker


class ReaderSaid(Struct, frozen=True):
    """A message of a decode worker on this worker's KV link; ``peer`` is its routing id."""

    peer: bytes
    message: FromDecode | UnreadHello


class ReaderLost(Struct, frozen=True):
    """A message to this reader could not be sent: it is gone or hopelessly slow."""

    peer: bytes


class SourceSaid(Struct, frozen=True):
    """A message of a prefill worker this worker pulls from."""

    source: SourceKey
    message: ToDecode | UnreadWelcome


class SourceLost(Struct, frozen=True):
    """The source's process ended, or its arena cannot be mapped."""

    source: SourceKey
    error: ErrorPayload


class PathChosen(Struct, frozen=True):
    """The self-test of a source's path has passed: its KV comes this way from now on."""

    source: SourceKey
    path: KvPath
    reason: PathReason
    codec_reason: CodecReason = "shared_memory"


class LayersWritten(Struct, frozen=True):
    """The running step ``step`` has written the KV of layers [0, ``end_layer``)."""

    step: int
    end_layer: int


class StepDone(Struct, frozen=True):
    """The engine finished step ``step``; ``at`` is when, on the clock of ``now``.

    ``lent``: so many cores of other workers helped.
    """

    step: int
    result: StepResult
    at: float
    lent: int = 0


class StepFailed(Struct, frozen=True):
    """The engine raised: nothing of step ``step`` can be trusted."""

    step: int
    error: ErrorPayload


class Copied(Struct, frozen=True):
    """Copy job ``job`` is done and every byte of it verified.

    ``again`` chunks had to be asked for more than once, ``spoiled`` did not verify.
    ``wire_bytes`` came over a socket, encoded by ``codec``.
    """

    job: int
    bytes: int
    seconds: float
    again: int = 0
    wire_bytes: int = 0
    codec: str = "none"
    spoiled: int = 0


class CopyFailed(Struct, frozen=True):
    """Copy job ``job`` is over and what it brought is void.

    ``reused`` blocks were allocated anew by their owner while they were copied. ``again`` and
    ``spoiled`` as in ``Copied``.
    """

    job: int
    error: ErrorPayload
    reused: int = 0
    again: int = 0
    spoiled: int = 0


class StopRequested(Struct, frozen=True):
    """The operator wants this process to end: finish what is open, take nothing new."""


class Tick(Struct, frozen=True):
    """Time passes; sent every 0.1 s. Counts are over all links so far."""

    rejected_frames: int = 0
    chunks_spoiled: int = 0


Event = (
    RouterSaid
    | ReaderSaid
    | ReaderLost
    | SourceSaid
    | SourceLost
    | PathChosen
    | LayersWritten
    | StepDone
    | StepFailed
    | Copied
    | CopyFailed
    | StopRequested
    | Tick
)
