"""What each source's KV cost this worker, by pair and path."""

from msgspec import Struct

from shared.ids import WorkerId
from shared.messages.fleet import CodecReason, KvPath, PairStatus, PathReason, PipelineRule
from shared.worker.events import Copied, PathChosen
from shared.worker.pipelining import PipelineGate

_MAX_PAIRS = 256


class _Pair(Struct):
    gate: PipelineGate
    path: KvPath | None = None
    reason: PathReason | None = None
    codec: str | None = None
    codec_reason: CodecReason | None = None
    transfers: int = 0
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    visible_seconds: float = 0.0
    chunks_again: int = 0
    wire_bytes: int = 0
    pipelined: int = 0
    pipelined_visible_seconds: float = 0.0


class Pairs:
    """The newest ``_MAX_PAIRS`` sources; a restarted source continues its line."""

    def __init__(self, pipeline: PipelineRule = True) -> None:
        self._pipeline = pipeline
        self._pairs: dict[WorkerId, _Pair] = {}

    def chosen(self, event: PathChosen) -> None:
        """The path of a source is known."""
        pair = self._of(event.source.worker)
        pair.path, pair.reason = event.path, event.reason
        pair.codec, pair.codec_reason = None, event.codec_reason

    def measurable(self, source: WorkerId) -> bool:
        """Return whether this source's path is known: the first hand-overs wait for its test."""
        pair = self._pairs.get(source)
        return pair is not None and pair.path is not None

    def pipelines(self, source: WorkerId, tokens: int) -> bool:
        """Return whether the next hand-over is announced while it is computed."""
        return self._of(source).gate.choose(tokens)

    def copied(self, source: WorkerId, event: Copied) -> None:
        """A copy job of this source is over."""
        pair = self._of(source)
        pair.bytes += event.bytes
        pair.wire_bytes += event.wire_bytes
        pair.seconds += event.seconds
        pair.chunks_again += event.again
        pair.codec = event.codec

    def arrived(
        self,
        source: WorkerId,
        visible: float,
        *,
        tokens: int = 0,
        pipelined: bool = False,
        fair: bool = False,
    ) -> None:
        """A hand-over is complete, ``visible`` seconds after its prefill was.

        ``fair``: nothing but the copies held it up, so it tells which way is the faster one.
        """
        pair = self._of(source)
        pair.transfers += 1
        pair.visible_seconds += visible
        if pipelined:
            pair.pipelined += 1
            pair.pipelined_visible_seconds += visible
        if fair:
            pair.gate.arrived(tokens, visible, pipelined=pipelined)

    def failed(self, source: WorkerId) -> None:
        """A hand-over was given up."""
        self._of(source).failed += 1

    def snapshot(self) -> tuple[PairStatus, ...]:
        """Return a line per source."""
        return tuple(
            PairStatus(
                source=source,
                path=pair.path,
                reason=pair.reason,
                transfers=pair.transfers,
                failed=pair.failed,
                bytes=pair.bytes,
                seconds=pair.seconds,
                visible_seconds=pair.visible_seconds,
                chunks_again=pair.chunks_again,
                codec=pair.codec,
                codec_reason=pair.codec_reason,
                wire_bytes=pair.wire_bytes,
                pipelined=pair.pipelined,
                pipelined_visible_seconds=pair.pipelined_visible_seconds,
                pipeline_reason=pair.gate.reason,
            )
            for source, pair in self._pairs.items()
        )

    def _of(self, source: WorkerId) -> _Pair:
        pair = self._pairs.get(source)
        if pair is None:
            while len(self._pairs) >= _MAX_PAIRS:
                del self._pairs[next(iter(self._pairs))]
            pair = self._pairs[source] = _Pair(PipelineGate(self._pipeline))
        return pair
