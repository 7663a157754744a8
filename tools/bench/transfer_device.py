"""``diptych bench transfer --device cuda``: KV from one GPU's memory into another's, or the same's.

``ipc`` stands beside one copy of as many bytes within the reading GPU, ``host`` beside two raw
sockets; both are measured in the same run.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from shared.device import open as devices
from shared.device.cuda_layout import PAGE
from shared.device.cuda_mapping import PROBE_SLABS, CudaMapping
from shared.device.cuda_pool import CudaPool
from shared.device.cuda_stage import CudaLand
from shared.device.cuda_stream import SideStream
from shared.device.pinned import address_of
from shared.errors import BadConfig, TransferFailed
from shared.worker.paths import memory_apart
from tools.bench.transfer import (
    own_context,
    raw_socket,
    rounds,
    rows_of,
    source_process,
)
from tools.bench.transfer_movers import HostMover, Mover, sleep_until
from tools.bench.transfer_plan import Span, TransferPlan, TransferRow, everything
from tools.bench.transfer_source import SourceReady, SourceSpec, contents


def parse_devices(plan: TransferPlan) -> tuple[str, str]:
    """Return the sender's device and the reader's.

    Raises:
        BadConfig: a CPU among them, or a codec or a link, which are for CPUs.
    """
    names = plan.device.split(",")
    if len(names) > 2 or "cpu" in names:
        raise BadConfig(
            "--device wants cpu, a GPU such as cuda:0, or the sender's and the reader's such as "
            f"cuda:0,cuda:1, not {plan.device!r}"
        )
    if plan.link is not None or plan.codecs != ("none",) or plan.sockets > 1:
        raise BadConfig(
            "KV of a GPU is measured as it is, over one socket: no --codec, no --sockets and no "
            "simulated link"
        )
    return names[0], names[-1]


def measure_devices(
    plan: TransferPlan, note: Callable[[str], None], launch: tuple[str, ...] = ("-m",)
) -> list[TransferRow]:
    """Measure both paths between two GPUs, and every length; ``launch`` as ``source_process``.

    Raises:
        BadConfig: as ``parse_devices``.
        ResourceMissing: a device, its libraries or memory are missing.
        TransferFailed: KV does not arrive intact, or CUDA IPC does not work between them.
    """
    sender, reader = parse_devices(plan)
    device = devices.open_device(reader)  # says why not before a process is started
    spec = SourceSpec(
        layout=plan.layout,
        num_blocks=plan.blocks(max(plan.lengths)),
        chunk_bytes=plan.chunk_bytes,
        address="127.0.0.1",
        device=sender,
        slots=plan.slots,
    )
    rows: list[TransferRow] = []
    with ExitStack() as stack:
        memory, pool = device.kv_memory(plan.layout, spec.num_blocks)
        stack.callback(memory.close)
        stack.callback(pool.close)
        assert isinstance(pool, CudaPool)
        stream = pool.side_stream()
        stack.callback(stream.close)
        process, ready = stack.enter_context(source_process(spec, launch=launch))
        context = stack.enter_context(own_context())
        raw = stack.enter_context(raw_socket(context, ready.raw_endpoint))
        ipc = DeviceMover(pool, ready, stream)
        stack.callback(ipc.close)
        landing = CudaLand(pool, plan.chunk_bytes)
        host = HostMover(context, plan, ready, pool, "none", landing)
        stack.callback(host.close)
        movers: list[Mover] = [ipc, host]
        for tokens in plan.lengths:
            with _scratch(pool, plan.size(tokens)) as (source, target):
                copy = partial(_copied, stream, target, source, plan.size(tokens))
                times = rounds(plan, tokens, movers, raw, copy, process, note)
            for mover in movers:
                _blank(pool, stream)
                mover.move(everything(plan, tokens), time.monotonic())
                compare(pool, stream, plan.blocks(tokens))
            rows += rows_of(plan, tokens, times)
    return rows


class DeviceMover:
    """Copies blocks out of the other process's GPU memory, as a decode worker does."""

    def __init__(self, pool: CudaPool, ready: SourceReady, stream: SideStream) -> None:
        apart = memory_apart(pool.cuda, ready.arena.cuda)
        if apart is not None:
            raise TransferFailed(f"no CUDA IPC between these devices: {apart}")
        slabs = pool.slabs(PROBE_SLABS, PAGE)
        self._stream = stream
        self._mapping = CudaMapping.open(pool, ready.arena, stream, slabs)

    def move(self, spans: list[Span], begun: float) -> int:
        """Copy each span, wait, and check its generations."""
        size = 0
        for span in spans:
            sleep_until(begun + span.at)
            blocks = range(span.first_block, span.end_block)
            layers = range(span.first_layer, span.end_layer)
            size += self._mapping.copy(self._stream, layers, blocks, blocks)
            self._stream.wait()
            if self._mapping.changed(blocks, (0,) * len(blocks)):
                raise TransferFailed("blocks changed while they were copied")
        return size

    def close(self) -> None:
        """Unmap."""
        self._mapping.close()


@contextmanager
def _scratch(pool: CudaPool, size: int) -> Iterator[tuple[int, int]]:
    """Take two pieces of the reading GPU's memory."""
    with ExitStack() as stack:
        pieces = []
        for _ in range(2):
            pieces.append(pool.memory.take(size))
            stack.callback(pool.memory.give_back, pieces[-1])
        yield pieces[0], pieces[1]


def _copied(stream: SideStream, target: int, source: int, size: int) -> float:
    """Copy within the GPU; the seconds until the event has passed."""
    begun = time.monotonic()
    stream.copy(target, source, size)
    stream.wait()
    return time.monotonic() - begun


def _blank(pool: CudaPool, stream: SideStream) -> None:
    for layer in range(len(pool.layout.layers)):
        for region in pool.regions[layer]:
            zeros = np.zeros(pool.num_blocks * region.unit, dtype=np.uint8)
            stream.copy(pool.address + region.start, address_of(zeros), zeros.nbytes)
            stream.wait()


def compare(pool: CudaPool, stream: SideStream, blocks: int) -> None:
    """Compare every byte of so many blocks with what the source was filled with.

    Raises:
        TransferFailed: a byte differs.
    """
    for layer, part, content in contents(pool.layout, pool.num_blocks):
        if pool.layout.owner(layer) != layer:
            continue
        region = pool.regions[layer][part]
        here = np.empty((blocks, region.unit), dtype=np.uint8)
        stream.copy(address_of(here), pool.address + region.start, here.nbytes)
        stream.wait()
        if not np.array_equal(here, content[:blocks]):
            raise TransferFailed(f"layer {layer} arrived with wrong bytes")
