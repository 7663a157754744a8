"""``diptych bench transfer``: how fast KV moves by each path, and what of it a request sees."""

import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec
import numpy as np
import psutil
import zmq
from msgspec import Struct

from shared.errors import TransferFailed
from shared.kv.arena import KvArena
from shared.kv.copy import copy_blocks, verify_generations
from shared.kv.layout import KvLayout
from shared.transport.bulk.fetches import FetchLimits
from shared.transport.bulk.reader import Fetched, FetchJob, HostReader, Outcome, Peer, ReaderLimits
from tools.bench.transfer_source import RAW_HWM, SourceReady, SourceSpec

Path = Literal["ipc", "host"]
_DEADLINE = 60.0


class TransferPlan(Struct, frozen=True, kw_only=True):
    """What to measure. ``prefill_rate``: tokens per second of the paced prefill."""

    layout: KvLayout
    lengths: tuple[int, ...]
    prefill_rate: float
    chunk_tokens: int = 512
    notify_layers: int = 8
    chunk_bytes: int = 512 << 10
    slots: int = 32
    repeats: int = 5


class TransferRow(Struct, frozen=True, kw_only=True):
    """One path and prompt length. Times in seconds, rates in bytes per second.

    ``seconds``: all KV at once. ``visible``: between the end of the prefill and the arrival
    of its KV, with layers announced while it runs or (``visible_off``) at its end only.
    ``share`` is the rate over ``reference``: memcpy for ``ipc``, two raw sockets for ``host``.
    """

    path: Path
    tokens: int
    bytes: int
    seconds: float
    rate: float
    reference: float
    share: float
    visible: float
    visible_off: float
    overlap: float
    cpu_seconds: float


class Span(Struct, frozen=True):
    """Layers of blocks that become readable ``at`` seconds after the prefill began."""

    at: float
    first_layer: int
    end_layer: int
    first_block: int
    end_block: int


def schedule(plan: TransferPlan, tokens: int, *, pipeline: bool) -> list[Span]:
    """Return the announcements of a prefill that computes at an even pace."""
    layers, size = len(plan.layout.layers), plan.layout.block_size
    total = tokens / plan.prefill_rate
    if not pipeline:
        return [Span(total, 0, layers, 0, -(-tokens // size))]
    spans = []
    for start in range(0, tokens, plan.chunk_tokens):
        end = min(tokens, start + plan.chunk_tokens)
        blocks = start // size, -(-end // size)
        for first in range(0, layers, plan.notify_layers):
            last = min(layers, first + plan.notify_layers)
            at = (start + (end - start) * last / layers) / plan.prefill_rate
            spans.append(Span(at, first, last, *blocks))
    return spans


def measure(plan: TransferPlan, note: Callable[[str], None]) -> list[TransferRow]:
    """Measure every path and length. Raises ``TransferFailed`` if KV does not arrive intact."""
    most = -(-max(plan.lengths) // plan.layout.block_size)
    spec = SourceSpec(
        layout=plan.layout,
        num_blocks=most,
        chunk_bytes=plan.chunk_bytes,
        raw_messages=max(64, (256 << 20) // plan.chunk_bytes),
    )
    rows = []
    with _source(spec) as (process, ready), _pool(plan.layout, most) as target:
        source = KvArena.open(ready.arena, plan.layout)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            note("two raw sockets")
            raw = max(_raw(context, ready.raw_endpoint, spec) for _ in range(plan.repeats))
            host = _Host(context, plan, ready, target)
            movers: dict[Path, _Ipc | _Host] = {"ipc": _Ipc(source, target), "host": host}
            for path, mover in movers.items():
                for tokens in plan.lengths:
                    note(f"{path}, {tokens} tokens")
                    reference = raw if path == "host" else _memcpy(plan, tokens)
                    rows.append(_row(plan, path, tokens, mover, reference, process))
                    _compare(source, target, -(-tokens // plan.layout.block_size))
            host.close()
        finally:
            source.close()
            context.term()
    return rows


class _Ipc:
    def __init__(self, source: KvArena, target: KvArena) -> None:
        self._source, self._target = source, target

    def move(self, spans: list[Span], begun: float) -> None:
        for span in spans:
            _sleep_until(begun + span.at)
            blocks = range(span.first_block, span.end_block)
            layers = range(span.first_layer, span.end_layer)
            told = [int(self._source.generations[b]) for b in blocks]
            copy_blocks(self._source, self._target, layers, blocks, blocks)
            if verify_generations(self._source, blocks, told):
                raise TransferFailed("blocks changed while they were copied")


class _Host:
    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        plan: TransferPlan,
        ready: SourceReady,
        target: KvArena,
    ) -> None:
        self._outcomes: queue.SimpleQueue[Outcome[str]] = queue.SimpleQueue()
        limits = ReaderLimits(
            chunk_bytes=plan.chunk_bytes, fetch=FetchLimits(slots=plan.slots, stall=10.0)
        )
        self._reader: HostReader[str] = HostReader(context, target, limits, self._outcomes.put)
        peer = Peer(endpoint=ready.endpoint, arena=ready.arena.arena_id, identity=b"bench#1")
        self._reader.open("bench", peer)
        self._outcomes.get(timeout=_DEADLINE)
        self._job = 0

    def move(self, spans: list[Span], begun: float) -> None:
        for span in spans:
            _sleep_until(begun + span.at)
            blocks = tuple(range(span.first_block, span.end_block))
            self._job += 1
            self._reader.fetch(
                FetchJob(
                    job=self._job,
                    source="bench",
                    first_layer=span.first_layer,
                    end_layer=span.end_layer,
                    source_blocks=blocks,
                    generations=(0,) * len(blocks),
                    target_blocks=blocks,
                )
            )
        for _ in spans:
            outcome = self._outcomes.get(timeout=_DEADLINE)
            if not isinstance(outcome, Fetched):
                raise TransferFailed(f"a fetch failed: {outcome}")

    def close(self) -> None:
        self._reader.close()


def _row(
    plan: TransferPlan,
    path: Path,
    tokens: int,
    mover: _Ipc | _Host,
    reference: float,
    process: psutil.Process,
) -> TransferRow:
    at_once = [Span(0.0, 0, len(plan.layout.layers), 0, -(-tokens // plan.layout.block_size))]
    mover.move(at_once, time.monotonic())
    cpu = _cpu(process)
    seconds = [_timed(mover, at_once) for _ in range(plan.repeats)]
    spent = (_cpu(process) - cpu) / plan.repeats
    on = schedule(plan, tokens, pipeline=True)
    off = schedule(plan, tokens, pipeline=False)
    visible = float(np.median([_timed(mover, on) for _ in range(3)]))
    visible_off = float(np.median([_timed(mover, off) for _ in range(3)]))
    size = at_once[0].end_block * plan.layout.block_bytes
    median = float(np.median(seconds))
    return TransferRow(
        path=path,
        tokens=tokens,
        bytes=size,
        seconds=median,
        rate=size / median,
        reference=reference,
        share=size / median / reference,
        visible=visible,
        visible_off=visible_off,
        overlap=max(0.0, 1.0 - visible / visible_off),
        cpu_seconds=spent,
    )


def _timed(mover: _Ipc | _Host, spans: list[Span]) -> float:
    """Return the seconds between the last announcement's time and the arrival of everything."""
    begun = time.monotonic()
    mover.move(spans, begun)
    return time.monotonic() - begun - spans[-1].at


def _sleep_until(moment: float) -> None:
    pause = moment - time.monotonic()
    if pause > 0:
        time.sleep(pause)


def _cpu(process: psutil.Process) -> float:
    other = process.cpu_times()
    return time.process_time() + other.user + other.system


def _memcpy(plan: TransferPlan, tokens: int) -> float:
    """Return the median rate of one copy of as many bytes, warm as the pools are."""
    size = -(-tokens // plan.layout.block_size) * plan.layout.block_bytes
    source, target = np.ones(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)
    rates = []
    for _ in range(plan.repeats):
        begun = time.monotonic()
        target[:] = source
        rates.append(size / (time.monotonic() - begun))
    return float(np.median(rates))


def _raw(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, spec: SourceSpec) -> float:
    """Return the rate of two sockets that do nothing else."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, RAW_HWM)
        socket.setsockopt(zmq.RCVTIMEO, int(1000 * _DEADLINE))
        socket.connect(endpoint)
        socket.send(b"go")
        socket.recv(copy=False)
        begun = time.monotonic()
        for _ in range(spec.raw_messages - 1):
            socket.recv(copy=False)
        return (spec.raw_messages - 1) * spec.chunk_bytes / (time.monotonic() - begun)


def _compare(source: KvArena, target: KvArena, blocks: int) -> None:
    for layer in range(len(source.layout.layers)):
        for theirs, ours in zip(source.raw(layer), target.raw(layer), strict=True):
            if not np.array_equal(theirs[:blocks], ours[:blocks]):
                raise TransferFailed(f"layer {layer} arrived with wrong bytes")
            ours[:blocks] = 0


@contextmanager
def _pool(layout: KvLayout, blocks: int) -> Iterator[KvArena]:
    arena = KvArena.create(layout, blocks)
    try:
        for layer in range(len(layout.layers)):
            for part in arena.raw(layer):
                part[:] = 0
        yield arena
    finally:
        arena.close()


@contextmanager
def _source(spec: SourceSpec) -> Iterator[tuple[psutil.Process, SourceReady]]:
    command = [sys.executable, "-m", "tools.bench.transfer_source"]
    with subprocess.Popen(
        [*command, msgspec.json.encode(spec).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise TransferFailed("the sending process did not start")
        yield psutil.Process(child.pid), msgspec.json.decode(line, type=SourceReady)
