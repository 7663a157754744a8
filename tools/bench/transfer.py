"""``diptych bench transfer``: how fast KV moves by each path, and what of it a request sees."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median

import msgspec
import numpy as np
import psutil
import zmq
from msgspec import Struct

from shared.errors import TransferFailed
from shared.kv.arena import KvArena
from shared.kv.codecs.frame import CodecName
from shared.transport.bulk.encoded import EncodedChunks
from shared.transport.bulk.plan import plan_encoded
from tools.bench.transfer_movers import DEADLINE, Context, HostMover, IpcMover, Mover
from tools.bench.transfer_nixl import NixlMover
from tools.bench.transfer_plan import Span, TransferPlan, TransferRow, everything, schedule
from tools.bench.transfer_source import RAW_HWM, SourceReady, SourceSpec
from tools.slow_link.hosts import LARGE_MTU, slow_link

_PACED = 3


class Times(Struct):
    """Seconds of every round, per way to announce."""

    wire: int = 0
    cpu: float = 0.0
    at_once: list[float] = []
    visible: list[float] = []
    visible_off: list[float] = []
    reference: list[float] = []


def measure(plan: TransferPlan, note: Callable[[str], None]) -> list[TransferRow]:
    """Measure every path and length, all paths of a length in turn.

    Raises:
        TransferFailed: KV does not arrive intact.
        ResourceMissing: there is to be a simulated link, which this machine cannot make.
    """
    most = plan.blocks(max(plan.lengths))
    rows = []
    with ExitStack() as stack:
        inside: tuple[str, ...] = ()
        address = "127.0.0.1"
        if plan.link is not None:
            hosts = stack.enter_context(slow_link(plan.link, LARGE_MTU))
            inside, address = hosts.inside, hosts.far
        spec = SourceSpec(
            layout=plan.layout,
            num_blocks=most,
            chunk_bytes=plan.chunk_bytes,
            address=address,
            sockets=plan.sockets,
            nixl=plan.nixl,
        )
        process, ready = stack.enter_context(source_process(spec, inside))
        target = stack.enter_context(_pool(plan, most))
        source = KvArena.open(ready.arena, plan.layout)
        stack.callback(source.close)
        context = stack.enter_context(own_context(plan.sockets))
        raw = stack.enter_context(raw_socket(context, ready.raw_endpoint))
        movers: list[Mover] = []
        for path, codec in plan.movers:
            if path == "ipc":
                movers.append(IpcMover(source, target))
                continue
            if path == "nixl":
                nixl = NixlMover(ready, target)
                stack.callback(nixl.close)
                movers.append(nixl)
                continue
            sockets = 1 if path == "host" else plan.sockets
            host = HostMover(context, plan, ready, target, codec, sockets=sockets)
            stack.callback(host.close)
            movers.append(host)
        for tokens in plan.lengths:
            copy = _memcpy_of(plan.size(tokens))
            times = rounds(plan, tokens, movers, raw, copy, process, note)
            for (path, codec), mover in zip(plan.movers, movers, strict=True):
                note(f"the bytes of {path} {codec}, {tokens} tokens")
                _check(plan, tokens, codec, mover, (source, target))
            rows += rows_of(plan, tokens, times)
    return rows


def rounds(
    plan: TransferPlan,
    tokens: int,
    movers: list[Mover],
    raw: "zmq.Socket[bytes]",
    copy: Callable[[], float],
    process: psutil.Process,
    note: Callable[[str], None],
) -> list[Times]:
    """Return the times of each mover; in each round all of them take their turn.

    ``copy`` returns the seconds of one copy of as many bytes, which ``ipc`` is measured against.
    """
    times = [Times(at_once=[], visible=[], visible_off=[], reference=[]) for _ in movers]
    at_once = everything(plan, tokens)
    on = schedule(plan, tokens, pipeline=True)
    off = schedule(plan, tokens, pipeline=False)
    size = plan.size(tokens)
    for number in range(-1, max(plan.repeats, _PACED)):  # the first one warms
        for (path, codec), mover, found in zip(plan.movers, movers, times, strict=True):
            note(f"{path} {codec}, {tokens} tokens")
            over_sockets = path.startswith("host")
            reference = _raw(raw, size, plan.chunk_bytes) if over_sockets else copy()
            cpu = _cpu(process)
            seconds, found.wire = _timed(mover, at_once)
            cpu = _cpu(process) - cpu
            if number < 0:
                continue
            if number < plan.repeats:
                found.reference.append(reference)
                found.at_once.append(seconds)
                found.cpu += cpu / plan.repeats
            if number < _PACED:
                found.visible.append(_timed(mover, on)[0])
                found.visible_off.append(_timed(mover, off)[0])
    return times


def rows_of(plan: TransferPlan, tokens: int, times: list[Times]) -> list[TransferRow]:
    """Return the medians of what ``rounds`` measured."""
    size = plan.size(tokens)
    plain = {
        path: median(found.visible_off)
        for (path, codec), found in zip(plan.movers, times, strict=True)
        if codec == "none"
    }
    rows = []
    for (path, codec), found in zip(plan.movers, times, strict=True):
        seconds, reference = median(found.at_once), size / median(found.reference)
        visible, visible_off = median(found.visible), median(found.visible_off)
        rows.append(
            TransferRow(
                path=path,
                codec=codec,
                tokens=tokens,
                bytes=size,
                wire=found.wire,
                seconds=seconds,
                rate=size / seconds,
                reference=reference,
                share=size / seconds / reference,
                visible=visible,
                visible_off=visible_off,
                overlap=max(0.0, 1.0 - visible / visible_off),
                of_plain=visible_off / plain[path],
                cpu_seconds=found.cpu,
                of_link=found.wire / seconds / plan.link.rate
                if plan.link and plan.link.rate
                else None,
            )
        )
    return rows


def _timed(mover: Mover, spans: list[Span]) -> tuple[float, int]:
    """Return the seconds from the last announcement to the arrival of everything, and bytes."""
    begun = time.monotonic()
    wire = mover.move(spans, begun)
    return time.monotonic() - begun - spans[-1].at, wire


def _cpu(process: psutil.Process) -> float:
    other = process.cpu_times()
    return time.process_time() + other.user + other.system


def _memcpy_of(size: int) -> Callable[[], float]:
    """Return what copies so many bytes, warm as the pools are, and returns the seconds."""
    source, target = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)

    def copy() -> float:
        begun = time.monotonic()
        target[:] = source
        return time.monotonic() - begun

    return copy


def _raw(socket: "zmq.Socket[bytes]", size: int, chunk: int) -> float:
    """Return the seconds that as many bytes take between two sockets that do nothing else: sent
    without a copy out of as much memory as the pool's, in frames of a chunk, received, dropped."""
    begun = time.monotonic()
    socket.send(msgspec.json.encode(size))
    try:
        for _ in range(-(-size // chunk)):
            socket.recv(copy=False)
    except zmq.Again:
        raise TransferFailed(
            f"nothing came from the sending process for {DEADLINE:g} s; a faster --rate, a "
            "shorter --delay or a smaller --chunk needs less"
        ) from None
    return time.monotonic() - begun


def _check(
    plan: TransferPlan,
    tokens: int,
    codec: CodecName,
    mover: Mover,
    pools: tuple[KvArena, KvArena],
) -> None:
    """Move once more into a cleared pool, and compare every byte with what it has to be."""
    source, target = pools
    blocks = plan.blocks(tokens)
    for layer in range(len(plan.layout.layers)):
        for part in target.raw(layer):
            part[:blocks] = 0
    mover.move(everything(plan, tokens), time.monotonic())
    if codec == "none":
        _compare(source, target, blocks)
        return
    with _pool(plan, blocks) as expected:
        theirs, ours = EncodedChunks(source), EncodedChunks(expected)
        numbers, count = range(blocks), blocks * plan.layout.block_size
        layers = range(len(plan.layout.layers))
        for chunk in plan_encoded(plan.layout, layers, blocks, plan.chunk_bytes):
            frames = theirs.encode(codec, chunk, numbers, count)
            ours.decode(codec, chunk, numbers, count, frames)
        _compare(expected, target, blocks)


def _compare(expected: KvArena, target: KvArena, blocks: int) -> None:
    for layer in range(len(expected.layout.layers)):
        for theirs, ours in zip(expected.raw(layer), target.raw(layer), strict=True):
            if not np.array_equal(theirs[:blocks], ours[:blocks]):
                raise TransferFailed(f"layer {layer} arrived with wrong bytes")


@contextmanager
def own_context(sockets: int = 1) -> Iterator[Context]:
    """Make a context with a thread for each of so many sockets, and end it."""
    context: Context = zmq.Context(sockets)
    try:
        yield context
    finally:
        context.term()


@contextmanager
def raw_socket(context: Context, endpoint: str) -> Iterator["zmq.Socket[bytes]"]:
    """Connect to the sending process's socket that does nothing else."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, RAW_HWM)
        socket.setsockopt(zmq.RCVTIMEO, int(1000 * DEADLINE))
        socket.connect(endpoint)
        yield socket


@contextmanager
def _pool(plan: TransferPlan, blocks: int) -> Iterator[KvArena]:
    arena = KvArena.create(plan.layout, blocks)
    try:
        for layer in range(len(plan.layout.layers)):
            for part in arena.raw(layer):
                part[:] = 0
        yield arena
    finally:
        arena.close()


@contextmanager
def source_process(
    spec: SourceSpec, inside: tuple[str, ...] = (), launch: tuple[str, ...] = ("-m",)
) -> Iterator[tuple[psutil.Process, SourceReady]]:
    """Run the sending process; ``launch`` is what Python gets before the module.

    Raises:
        TransferFailed: it did not start; its own words are on standard error.
    """
    command = [*inside, sys.executable, *launch, "tools.bench.transfer_source"]
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
