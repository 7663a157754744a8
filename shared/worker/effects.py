"""What a worker's state machine asks its service to do."""

from msgspec import Struct

from shared.engine.batch import StepInput
from shared.ids import BlockId, HostId
from shared.messages.fleet import PathRule
from shared.messages.prefill_decode import (
    ArenaDescriptor,
    FromDecode,
    NixlDescriptor,
    ToDecode,
)
from shared.messages.router_worker import FromWorker
from shared.worker.events import SourceKey
from shared.worker.paths import CodecTerms


class RunStep(Struct, frozen=True):
    """Run one engine step; answered by ``StepDone`` or ``StepFailed``.

    ``announce``: also report ``LayersWritten`` after so many layers, while it runs.
    """

    step: int
    batch: StepInput
    announce: tuple[int, ...]


class ToRouter(Struct, frozen=True):
    """Send to the router."""

    message: FromWorker


class ToReader(Struct, frozen=True):
    """Send to a decode worker on this worker's KV link; failure is a ``ReaderLost``."""

    peer: bytes
    message: ToDecode


class ConnectSource(Struct, frozen=True):
    """Open a link to a prefill worker's KV endpoint."""

    source: SourceKey
    endpoint: str


class ToSource(Struct, frozen=True):
    """Send to a prefill worker over the link opened before."""

    source: SourceKey
    message: FromDecode


class MapArena(Struct, frozen=True):
    """Find the path to the source's pool and watch its process if it is on this host.

    Answered by ``PathChosen``; failure, or the end of the process, is a ``SourceLost``.
    """

    source: SourceKey
    arena: ArenaDescriptor
    host: HostId = HostId("")
    bulk: str | None = None
    path: PathRule = "auto"
    terms: CodecTerms = CodecTerms("none", "unknown")
    nixl: NixlDescriptor | None = None


class CloseSource(Struct, frozen=True):
    """Drop link and mapping; jobs already given still get their answer."""

    source: SourceKey


class Copy(Struct, frozen=True, kw_only=True):
    """Copy blocks of layers [``first_layer``, ``end_layer``), then compare generations.

    Answered by ``Copied`` or ``CopyFailed``, always, and ``target_blocks`` are not touched
    after the answer. Only the first ``tokens`` tokens of the blocks are wanted; 0: all.
    """

    job: int
    source: SourceKey
    first_layer: int
    end_layer: int
    source_blocks: tuple[int, ...]
    generations: tuple[int, ...]
    target_blocks: tuple[BlockId, ...]
    tokens: int = 0


class Note(Struct, frozen=True):
    """One line for the log: a warning about one request or one peer."""

    text: str


class Exit(Struct, frozen=True):
    """End the process. ``error`` None is the orderly end, ``refused`` makes a restart useless."""

    error: str | None = None
    refused: bool = False


Effect = (
    RunStep
    | ToRouter
    | ToReader
    | ConnectSource
    | ToSource
    | MapArena
    | CloseSource
    | Copy
    | Note
    | Exit
)
