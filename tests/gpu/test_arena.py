"""The arena's memory: taken, given back, and refused where there is too little."""

import pytest

from shared.device.cuda import CudaDevice
from shared.device.cuda_arena import CudaArena
from shared.device.cuda_layout import cuda_arena_size
from shared.errors import ResourceMissing
from shared.kv.layout import KvLayout, LayerKv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.keeps("threads", "fds", "memory"),
    pytest.mark.timeout(300),
]

LAYOUT = KvLayout(dtype="bf16", block_size=16, layers=(LayerKv(2, 64, 64), LayerKv(2, 64, 64)))
ID = 0x1234_5678_9ABC_DEF0


def test_memory_is_taken_and_given_back(device: CudaDevice) -> None:
    blocks = (256 << 20) // LAYOUT.block_bytes
    before = device.facts().memory_free
    arena = CudaArena.create(device.memory, LAYOUT, blocks, ID)
    assert before - device.facts().memory_free >= cuda_arena_size(LAYOUT, blocks)
    assert not arena.k(1).any()
    arena.close()
    assert device.facts().memory_free >= before - (8 << 20)


def test_more_than_the_device_has_is_refused_with_what_is_free(device: CudaDevice) -> None:
    blocks = 2 * device.facts().memory_total // LAYOUT.block_bytes
    with pytest.raises(ResourceMissing, match="lower `kv_memory`"):
        CudaArena.create(device.memory, LAYOUT, blocks, ID)
