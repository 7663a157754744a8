"""The CUDA arena over a fake CuPy: layout, ownership, export, and every refusal."""

from collections.abc import Iterator

import pytest
import torch

from shared.device.cpu import CpuDevice
from shared.device.cuda import CudaDevice
from shared.device.cuda_arena import CudaArena
from shared.device.cuda_layout import cuda_arena_size
from shared.device.cuda_memory import CupyMemory
from shared.device.cuda_pool import CudaPool
from shared.errors import IncompatiblePeer, ResourceMissing
from shared.kv.arena import KvArena
from shared.kv.layout import KvLayout, LayerKv
from tests.unit.fake_cupy import FakeCupy, FakeRuntime, view

LAYOUT = KvLayout(
    dtype="bf16",
    block_size=4,
    layers=(LayerKv(2, 8, 6), LayerKv(1, 16, 16, window=7), LayerKv(2, 8, 6, shares=0)),
)
ID = 0x1234_5678_9ABC_DEF0


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    FakeRuntime.exported.clear()
    yield FakeRuntime()


def memory(runtime: FakeRuntime, *, sliced: bool = False) -> CupyMemory:
    return CupyMemory(FakeCupy(runtime), 0, view, sliced=sliced)


def test_layers_do_not_overlap_and_have_a_scratch_block(runtime: FakeRuntime) -> None:
    """A byte written for one layer must be no other's, in the block past the last one, too."""
    arena = CudaArena.create(memory(runtime), LAYOUT, 5, ID)
    assert arena.k(0).shape == (6, 4, 2, 8)
    assert arena.v(0).shape == (6, 4, 2, 6)
    assert arena.num_blocks == 5
    pools = [arena.k(0), arena.v(0), arena.k(1), arena.v(1)]
    assert all(not pool.any() for pool in pools)
    for number, pool in enumerate(pools):
        pool.fill_(number + 1)
    assert (
        [int(pool.min()) for pool in pools] == [int(pool.max()) for pool in pools] == [1, 2, 3, 4]
    )
    assert arena.k(2).data_ptr() == arena.k(0).data_ptr()
    del pools, pool
    arena.close()
    arena.close()
    assert not runtime.taken


def test_all_kv_is_one_allocation(runtime: FakeRuntime) -> None:
    """Handles are for whole allocations: a second one would be a second handle."""
    arena = CudaArena.create(memory(runtime), LAYOUT, 5, ID)
    assert [len(m) for m in runtime.taken.values()] == [cuda_arena_size(LAYOUT, 5)]
    assert cuda_arena_size(LAYOUT, 5) >= 6 * LAYOUT.block_bytes
    arena.close()


def test_a_pool_too_large_says_what_is_free(runtime: FakeRuntime) -> None:
    runtime.room = 1 << 20
    with pytest.raises(ResourceMissing, match=r"has 1 of 1 MiB free; lower `kv_memory`"):
        CudaArena.create(memory(runtime), LAYOUT, 100_000, ID)
    assert not runtime.taken


def test_other_failures_to_allocate_keep_cudas_words(runtime: FakeRuntime) -> None:
    runtime.fails["malloc"] = 46
    with pytest.raises(ResourceMissing, match="gives no memory for KV: cudaError 46"):
        CudaArena.create(memory(runtime), LAYOUT, 5, ID)


def test_generations_lie_where_other_processes_can_read_them(runtime: FakeRuntime) -> None:
    """The device's memory cannot be read by a peer's CPU after each copy; the book can."""
    device = CudaDevice(0, memory(runtime), "NVIDIA H200", "unit")
    pool, book = device.kv_memory(LAYOUT, 5)
    assert pool.num_blocks == book.num_blocks == len(book.generations) == 5
    assert not pool.read_only
    assert isinstance(book, CudaPool) and book.layout == LAYOUT
    with pytest.raises(IncompatiblePeer):
        KvArena.open(book.descriptor(), LAYOUT)
    facts = device.facts()
    assert (facts.kind, facts.name) == ("cuda", "NVIDIA H200")
    assert facts.memory_total - facts.memory_free == cuda_arena_size(LAYOUT, 5)
    book.close()
    pool.close()


def test_what_torch_keeps_for_later_is_there_for_kv(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards KV that does not fit beside memory that the loader needed and torch has kept."""
    order: list[str] = []
    malloc = runtime.malloc

    def taken(size: int) -> int:
        order.append("malloc")
        return malloc(size)

    monkeypatch.setattr(runtime, "malloc", taken)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("empty"))
    pool, book = CudaDevice(0, memory(runtime), "NVIDIA H200", "unit").kv_memory(LAYOUT, 5)
    assert order == ["empty", "malloc"]
    book.close()
    pool.close()


def test_no_book_is_left_when_the_device_has_no_room(runtime: FakeRuntime) -> None:
    """The leak check counts its memory file."""
    runtime.room = 1 << 10
    with pytest.raises(ResourceMissing):
        CudaDevice(0, memory(runtime), "NVIDIA H200", "unit").kv_memory(LAYOUT, 5)


def test_the_cpus_pool_is_what_peers_read() -> None:
    device = CpuDevice()
    pool, arena = device.kv_memory(LAYOUT, 5)
    assert pool is arena
    assert device.facts().memory_free > 0
    target = torch.zeros(4, dtype=torch.int32)
    source = device.host_buffer(4)
    source.fill_(3)
    device.upload(source, target)
    assert device.event().query()
    assert device.download(target).tolist() == [3] * 4
    arena.close()
