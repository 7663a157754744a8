"""What each source's KV cost this worker, by pair, path and why that path."""

from msgspec import Struct

from shared.ids import WorkerId
from shared.messages.fleet import CodecReason, KvPath, PairStatus, PathReason, PipelineRule
from shared.worker.events import Copied, CopyFailed, PathChosen, SourceKey
from shared.worker.pipelining import PipelineGate

_MAX_LINES = 256
_LONGEST_PROBLEM = 400


class _Key(Struct, frozen=True):
    source: WorkerId
    path: KvPath | None = None
    reason: PathReason | None = None


class _Line(Struct):
    gate: PipelineGate
    codec: str | None = None
    codec_reason: CodecReason | None = None
    chosen: int = 0
    transfers: int = 0
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    visible_seconds: float = 0.0
    chunks_again: int = 0
    chunks_spoiled: int = 0
    generation_mismatches: int = 0
    wire_bytes: int = 0
    pipelined: int = 0
    pipelined_visible_seconds: float = 0.0
    problem: str | None = None


_COUNTED = tuple(name for name in _Line.__struct_fields__ if name != "gate")


class Pairs:
    """The newest ``_MAX_LINES`` sources and paths.

    A source whose path is another one now gets another line, so that no line ever counts what
    came some other way; a restarted source with the same path continues its line.
    """

    def __init__(self, pipeline: PipelineRule = True) -> None:
        self._pipeline = pipeline
        self._lines: dict[_Key, _Line] = {}
        self._paths: dict[SourceKey, _Key] = {}

    def chosen(self, event: PathChosen) -> None:
        """The path of a source is known."""
        key = _Key(event.source.worker, event.path, event.reason)
        self._solved(_Key(event.source.worker))
        self._set(event.source, key)
        line = self._line(key)
        line.chosen += 1
        line.codec, line.codec_reason = None, event.codec_reason

    def pathless(self, source: SourceKey, problem: str) -> None:
        """No path to this life of a source was found."""
        key = _Key(source.worker)
        self._set(source, key)
        self._line(key).problem = problem[:_LONGEST_PROBLEM]

    def pipelines(self, source: SourceKey, tokens: int) -> bool:
        """Return whether the next hand-over is announced while it is computed."""
        return self._of(source).gate.choose(tokens)

    def copied(self, source: SourceKey, event: Copied | CopyFailed) -> None:
        """A copy job of this source is over."""
        line = self._of(source)
        line.chunks_again += event.again
        line.chunks_spoiled += event.spoiled
        if isinstance(event, CopyFailed):
            line.generation_mismatches += event.reused
            return
        line.bytes += event.bytes
        line.wire_bytes += event.wire_bytes
        line.seconds += event.seconds
        line.codec = event.codec

    def arrived(
        self,
        source: SourceKey,
        visible: float,
        *,
        tokens: int = 0,
        pipelined: bool = False,
        fair: bool = False,
    ) -> None:
        """A hand-over is complete, ``visible`` seconds after its prefill was.

        ``fair``: nothing but the copies held it up, so it tells which way is the faster one.
        """
        line = self._of(source)
        line.transfers += 1
        line.visible_seconds += visible
        if pipelined:
            line.pipelined += 1
            line.pipelined_visible_seconds += visible
        if fair:
            line.gate.arrived(tokens, visible, pipelined=pipelined)

    def failed(self, source: SourceKey) -> None:
        """A hand-over was given up."""
        self._of(source).failed += 1

    def snapshot(self) -> tuple[PairStatus, ...]:
        """Return a line per source, path and reason, the oldest first."""
        newest = {source.worker: key for source, key in self._paths.items()}
        return tuple(
            PairStatus(
                source=key.source,
                path=key.path,
                reason=key.reason,
                former=newest.get(key.source, key) != key,
                pipeline_reason=line.gate.reason,
                **{name: getattr(line, name) for name in _COUNTED},
            )
            for key, line in self._lines.items()
        )

    def _set(self, source: SourceKey, key: _Key) -> None:
        self._paths.pop(source, None)
        while len(self._paths) >= _MAX_LINES:
            del self._paths[next(iter(self._paths))]
        self._paths[source] = key

    def _solved(self, key: _Key) -> None:
        """Forget what kept a source from having a path, and the line if it counts nothing."""
        line = self._lines.get(key)
        if line is not None:
            line.problem = None
            if not line.failed:
                del self._lines[key]

    def _of(self, source: SourceKey) -> _Line:
        return self._line(self._paths.get(source) or _Key(source.worker))

    def _line(self, key: _Key) -> _Line:
        line = self._lines.get(key)
        if line is None:
            while len(self._lines) >= _MAX_LINES:
                del self._lines[next(iter(self._lines))]
            line = self._lines[key] = _Line(PipelineGate(self._pipeline))
        return line
