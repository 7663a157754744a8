"""What each source's KV cost this worker, by pair and path."""

from msgspec import Struct

from shared.ids import WorkerId
from shared.messages.fleet import CodecReason, KvPath, PairStatus, PathReason
from shared.worker.events import Copied, PathChosen

_MAX_PAIRS = 256


class _Pair(Struct):
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


class Pairs:
    """The newest ``_MAX_PAIRS`` sources; a restarted source continues its line."""

    def __init__(self) -> None:
        self._pairs: dict[WorkerId, _Pair] = {}

    def chosen(self, event: PathChosen) -> None:
        """The path of a source is known."""
        pair = self._of(event.source.worker)
        pair.path, pair.reason = event.path, event.reason
        pair.codec, pair.codec_reason = None, event.codec_reason

    def copied(self, source: WorkerId, event: Copied) -> None:
        """A copy job of this source is over."""
        pair = self._of(source)
        pair.bytes += event.bytes
        pair.wire_bytes += event.wire_bytes
        pair.seconds += event.seconds
        pair.chunks_again += event.again
        pair.codec = event.codec

    def arrived(self, source: WorkerId, visible: float) -> None:
        """A hand-over is complete, ``visible`` seconds after its prefill was."""
        pair = self._of(source)
        pair.transfers += 1
        pair.visible_seconds += visible

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
            )
            for source, pair in self._pairs.items()
        )

    def _of(self, source: WorkerId) -> _Pair:
        pair = self._pairs.get(source)
        if pair is None:
            while len(self._pairs) >= _MAX_PAIRS:
                del self._pairs[next(iter(self._pairs))]
            pair = self._pairs[source] = _Pair()
        return pair
