"""KV out of one process's GPU memory into another's: CUDA IPC is real here, and its refusals."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
import torch
import zmq

from shared.device.cuda import CudaDevice
from shared.device.cuda_layout import PAGE
from shared.device.cuda_mapping import PROBE_SLABS, CudaMapping
from shared.device.cuda_pool import CudaPool
from shared.device.cuda_stage import CudaLand, CudaLift
from shared.device.cuda_stream import SideStream
from shared.errors import TransferFailed
from shared.kv.layout import KvLayout, LayerKv
from shared.messages.prefill_decode import ArenaDescriptor
from shared.transport.bulk.reader import Fetched, FetchJob, HostReader, Opened, ReaderLimits
from shared.transport.bulk.server import HostServer
from shared.transport.bulk.source_link import Peer
from tests.gpu.ipc_child import Asked, content

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.keeps("threads", "fds", "memory"),
    pytest.mark.timeout(300),
]

LAYOUT = KvLayout(
    dtype="bf16", block_size=16, layers=(LayerKv(8, 128, 128), LayerKv(2, 64, 48, window=64))
)
BLOCKS = 64
THEIRS = (*range(0, 32), 40, 63, 33)
OURS = (*range(8, 40), 2, 1, 0)
TOLD = (0,) * len(THEIRS)


class Owner:
    """The other process."""

    def __init__(self, process: "subprocess.Popen[str]", arena: ArenaDescriptor) -> None:
        self.process = process
        self.arena = arena

    def reuse(self, block: int) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"reuse {block}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@contextmanager
def owner(device: str) -> Iterator[Owner]:
    asked = msgspec.json.encode(Asked(device, LAYOUT, BLOCKS)).decode()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.ipc_child", asked],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        arena = msgspec.json.decode(process.stdout.readline(), type=ArenaDescriptor)
        yield Owner(process, arena)
        process.kill()


@pytest.fixture
def pool(device: CudaDevice) -> Iterator[CudaPool]:
    memory, pool = device.kv_memory(LAYOUT, BLOCKS)
    assert isinstance(pool, CudaPool)
    yield pool
    pool.close()
    memory.close()


@pytest.fixture
def stream(pool: CudaPool) -> Iterator[SideStream]:
    made = pool.side_stream()
    yield made
    made.close()


def require_arrived(pool: CudaPool) -> None:
    """Compare every byte of what was asked for, and that nothing else was written."""
    for layer in range(len(LAYOUT.layers)):
        for part, tensor in enumerate((pool.arena.k(layer), pool.arena.v(layer))):
            here = tensor[:BLOCKS].view(BLOCKS, -1).view(torch.uint8).cpu()
            expected = torch.zeros_like(here)
            expected[list(OURS)] = content(LAYOUT, layer, part, BLOCKS)[list(THEIRS)]
            assert torch.equal(here, expected)


@pytest.fixture(params=["cuda:0", "cuda:1"])
def source(request: pytest.FixtureRequest, device: CudaDevice) -> Iterator[Owner]:
    """The owner on the same GPU, and on another one if there is one."""
    name = str(request.param)
    if int(name[-1]) >= torch.cuda.device_count():
        pytest.skip("there is one GPU only")
    with owner(name) as made:
        yield made


def mapped(pool: CudaPool, source: Owner, stream: SideStream) -> CudaMapping:
    return CudaMapping.open(pool, source.arena, stream, pool.slabs(PROBE_SLABS, PAGE))


def test_every_byte_arrives_by_cuda_ipc(pool: CudaPool, source: Owner, stream: SideStream) -> None:
    mapping = mapped(pool, source, stream)
    size = mapping.copy(stream, range(2), THEIRS, OURS)
    stream.wait()
    assert size == len(THEIRS) * LAYOUT.block_bytes
    assert not mapping.changed(THEIRS, TOLD)
    require_arrived(pool)
    mapping.close()


def test_blocks_used_anew_are_told(pool: CudaPool, source: Owner, stream: SideStream) -> None:
    mapping = mapped(pool, source, stream)
    source.reuse(40)
    mapping.copy(stream, range(2), THEIRS, OURS)
    stream.wait()
    assert mapping.changed(THEIRS, TOLD) == [40]
    mapping.close()


def test_nothing_of_a_killed_owner_is_trusted(
    pool: CudaPool, source: Owner, stream: SideStream
) -> None:
    """And this process goes on: its device still works."""
    mapping = mapped(pool, source, stream)
    source.process.kill()
    source.process.wait(30)
    with pytest.raises(TransferFailed, match="ended while"):
        mapping.changed(THEIRS, TOLD)
    mapping.close()
    assert float(torch.ones(8, device="cuda").sum()) == 8.0


def test_a_handle_is_mapped_twice_and_unmapped_once(
    pool: CudaPool, source: Owner, stream: SideStream
) -> None:
    one, other = mapped(pool, source, stream), mapped(pool, source, stream)
    one.close()
    other.copy(stream, range(2), THEIRS, OURS)
    stream.wait()
    require_arrived(pool)
    other.close()


def test_another_arena_than_announced_is_refused(
    pool: CudaPool, source: Owner, stream: SideStream
) -> None:
    with owner("cuda:0") as stranger:
        wrong = msgspec.structs.replace(source.arena, cuda=stranger.arena.cuda)
        with pytest.raises(TransferFailed, match="another arena"):
            mapped(pool, Owner(source.process, wrong), stream)


def test_a_gone_owners_handle_is_refused(pool: CudaPool, source: Owner, stream: SideStream) -> None:
    source.process.kill()
    source.process.wait(30)
    with pytest.raises(TransferFailed):
        mapped(pool, source, stream)


def test_every_byte_arrives_through_pinned_slabs(device: CudaDevice, pool: CudaPool) -> None:
    """The ``host`` path from GPU to GPU: sockets, and the copies on both sides."""
    memory, source = device.kv_memory(LAYOUT, BLOCKS)
    assert isinstance(source, CudaPool)
    for layer in range(len(LAYOUT.layers)):
        for part, tensor in enumerate((memory.k(layer), memory.v(layer))):
            there = tensor[:BLOCKS].view(BLOCKS, -1).view(torch.uint8)
            there.copy_(content(LAYOUT, layer, part, BLOCKS))
    device.synchronise()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stage = CudaLift(source, 4, 64 << 10)
    server = HostServer(context, "tcp://127.0.0.1:0", source, worker="gpu", stage=stage)
    told: SimpleQueue[object] = SimpleQueue()
    limits = ReaderLimits(chunk_bytes=64 << 10)
    reader: HostReader[str] = HostReader(
        *(context, pool, limits, told.put), CudaLand(pool, 64 << 10)
    )
    arena = source.descriptor().arena_id
    reader.open("gpu", Peer(endpoint=server.endpoint, arena=arena, identity=b"gpu#1"))
    assert told.get(timeout=30) == Opened("gpu", None)
    reader.fetch(
        FetchJob(
            job=1,
            source="gpu",
            first_layer=0,
            end_layer=2,
            source_blocks=THEIRS,
            generations=TOLD,
            target_blocks=OURS,
        )
    )
    assert isinstance(told.get(timeout=60), Fetched)
    require_arrived(pool)
    reader.close()
    server.close()
    context.term()
    source.close()
    memory.close()
