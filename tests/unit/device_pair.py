"""Two workers' pools and what moves KV between them, each in the CPU's memory or a fake GPU's."""

import asyncio
import gc
import os
import queue
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from shared.config import SecuritySection
from shared.device.cuda_arena import CudaArena
from shared.device.cuda_memory import CupyMemory
from shared.device.cuda_pool import BOOK_LAYOUT, CudaPool
from shared.device.cuda_stage import CudaLift
from shared.device.device import SharedKv
from shared.errors import DeviceLost
from shared.fault_rules import FaultsSection
from shared.ids import HostId, Incarnation, WorkerId
from shared.kv.arena import KvArena
from shared.kv.layout import KvLayout, LayerKv
from shared.messages.fleet import PathRule
from shared.messages.prefill_decode import ArenaDescriptor
from shared.transport.bulk.faults import FaultyCopies
from shared.transport.bulk.fetches import FetchLimits
from shared.transport.bulk.reader import ReaderLimits
from shared.transport.bulk.server import HostServer
from shared.worker.effects import Copy, MapArena
from shared.worker.events import Event, SourceKey
from shared.worker.movers import Extras, Movers
from shared.worker.paths import CodecTerms
from tests.unit.fake_cupy import FakeCupy, FakeRuntime, view

Kind = Literal["cpu", "cuda"]

LAYOUT = KvLayout(
    dtype="bf16",
    block_size=4,
    layers=(LayerKv(2, 8, 6), LayerKv(1, 16, 16, window=7), LayerKv(2, 8, 6, shares=0)),
)
SOURCE = SourceKey(WorkerId("prefill-0"), Incarnation(7))
HERE = HostId("here")
BLOCKS = 8
NO_CODEC = CodecTerms()


def cuda_pool(
    runtime: FakeRuntime,
    *,
    index: int = 0,
    blocks: int = BLOCKS,
    layout: KvLayout = LAYOUT,
    sliced: bool = False,
) -> CudaPool:
    """Return a pool on fake device ``index``."""
    cupy = FakeCupy(runtime)
    memory = CupyMemory(cupy, index, view, sliced=sliced, patience=0.2)
    book = KvArena.create(BOOK_LAYOUT, blocks)
    arena = CudaArena.create(memory, layout, blocks, book.descriptor().arena_id)
    return CudaPool(arena, book, memory, memory.unit())


def raw(pool: SharedKv, layer: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the bytes of K and V [blocks, bytes per block] of either kind of pool, no copy."""
    if isinstance(pool, KvArena):
        return pool.raw(layer)
    assert isinstance(pool, CudaPool)
    k, v = (
        view(pool.address + region.start, pool.num_blocks * region.unit)
        .numpy()
        .reshape(pool.num_blocks, region.unit)
        for region in pool.regions[layer]
    )
    return k, v


def fill(pool: SharedKv, seed: int) -> None:
    """Fill every block with bytes of its own."""
    dice = np.random.default_rng(seed)
    for layer in range(len(pool.layout.layers)):
        if pool.layout.owner(layer) == layer:
            for part in raw(pool, layer):
                part[:] = dice.integers(0, 256, part.shape, dtype=np.uint8)


class Pair:
    """Movers of a decode worker on the loop, a source's pool with its server, what is posted."""

    def __init__(
        self,
        directory: Path,
        source: Kind = "cuda",
        target: Kind = "cuda",
        *,
        source_gpu: int = 0,
        sliced: bool = False,
        faults: FaultsSection | None = None,
        slabs: int = 2,
    ) -> None:
        FakeRuntime.exported.clear()
        self.theirs, self.ours = FakeRuntime(), FakeRuntime()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.lost: queue.SimpleQueue[DeviceLost] = queue.SimpleQueue()
        self.source: SharedKv = KvArena.create(LAYOUT, BLOCKS)
        stage: CudaLift | None = None
        if source == "cuda":
            self.source.close()
            self.source = cuda_pool(self.theirs, index=source_gpu, sliced=sliced)
            stage = CudaLift(self.source, slabs, 512)
        self.target: SharedKv = KvArena.create(LAYOUT, BLOCKS)
        if target == "cuda":
            self.target.close()
            self.target = cuda_pool(self.ours)
            self.target.when_lost(self.lost.put)
        fill(self.source, 1)
        self.server = HostServer(
            self.context,
            f"ipc://{directory}/bulk.sock",
            self.source,
            worker="prefill-0",
            stage=stage,
        )
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.movers = Movers(
            self.target,
            self.events.put_nowait,
            host=HERE,
            identity=b"decode-0#1",
            security=SecuritySection(),
            limits=ReaderLimits(
                chunk_bytes=512, probe=1.0, fetch=FetchLimits(stall=0.2, attempts=2)
            ),
            extras=Extras(None if faults is None else FaultyCopies(faults, "decode-0")),
        )

    @property
    def descriptor(self) -> ArenaDescriptor:
        return self.source.descriptor()

    def open(
        self,
        *,
        key: SourceKey = SOURCE,
        path: PathRule = "auto",
        arena: ArenaDescriptor | None = None,
        bulk: bool = True,
        terms: CodecTerms = NO_CODEC,
    ) -> None:
        """Have the source's path found."""
        self.movers.open(
            MapArena(
                source=key,
                arena=arena or self.descriptor,
                host=HERE,
                bulk=self.server.endpoint if bulk else None,
                path=path,
                terms=terms,
            )
        )

    def with_cuda(self, **changes: object) -> ArenaDescriptor:
        """Return the source's descriptor with another GPU part."""
        assert self.descriptor.cuda is not None
        cuda = msgspec.structs.replace(self.descriptor.cuda, **changes)
        return msgspec.structs.replace(self.descriptor, cuda=cuda)

    def copy(self, job: int, *, key: SourceKey = SOURCE, generation: int = 0) -> None:
        """Ask for blocks 1, 2, 6 as 4, 5, 0 in all layers."""
        self.movers.copy(
            Copy(
                job=job,
                source=key,
                first_layer=0,
                end_layer=3,
                source_blocks=(1, 2, 6),
                generations=(generation,) * 3,
                target_blocks=(4, 5, 0),  # type: ignore[arg-type]
            )
        )

    def arrived(self) -> bool:
        """Compare every byte of what ``copy`` asks for, and that no other block was touched."""
        for layer in (0, 1):
            for theirs, ours in zip(raw(self.source, layer), raw(self.target, layer), strict=True):
                if not np.array_equal(theirs[[1, 2, 6]], ours[[4, 5, 0]]):
                    return False
                assert not ours[[1, 2, 3, 6, 7]].any(), "a block that nobody asked for"
        return True

    async def next(self) -> Event:
        async with asyncio.timeout(20):
            return await self.events.get()

    def close(self) -> None:
        self.movers.close()
        self.server.close()
        self.context.term()
        for pool in (self.source, self.target):
            pool.close()
            if isinstance(pool, CudaPool):
                pool.arena.close()


def _is(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def paired(
    run_async: Callable[..., None],
    pair: Callable[[], Pair],
    test: Callable[[Pair], Coroutine[object, object, None]],
) -> None:
    """Run ``test`` with a pair on the loop; afterwards nothing of the devices may be left."""

    async def play() -> None:
        made = pair()
        try:
            await test(made)
        finally:
            made.close()
        for _ in range(200):  # libzmq's last frames hold slabs for a moment
            if not made.theirs.pinned and not made.ours.pinned:
                break
            gc.collect()
            await asyncio.sleep(0.01)
        held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is(fd)]
        assert not [name for name in held if name.endswith("/stat")], "an owner is still watched"
        for runtime in (made.theirs, made.ours):
            assert not runtime.pinned, "pinned memory is left"
            assert not runtime.mapped, "a peer's memory is still mapped"
            assert not runtime.streams and not runtime.events
            assert not runtime.taken

    run_async(play())
