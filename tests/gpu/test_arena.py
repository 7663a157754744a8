"""The arena between two processes: CUDA IPC is real here, and so are its refusals."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.device.cuda import CudaDevice
from shared.device.cuda_arena import CudaArena, cuda_arena_size
from shared.errors import ResourceMissing
from shared.kv.layout import KvLayout, LayerKv
from tests.gpu.ipc_child import Asked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.keeps("threads", "fds", "memory"),
    pytest.mark.timeout(300),
]

LAYOUT = KvLayout(dtype="bf16", block_size=16, layers=(LayerKv(2, 64, 64), LayerKv(2, 64, 64)))
ID = 0x1234_5678_9ABC_DEF0


def ask_peer(asked: Asked) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.ipc_child"],
        input=msgspec.json.encode(asked),
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        check=True,
        timeout=120,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_a_peer_reads_what_the_owner_wrote(device: CudaDevice) -> None:
    arena = CudaArena.create(device.memory, LAYOUT, 8, ID)
    handle = arena.handle(device.facts().unit, ID)
    for turn in range(2):  # handles stay good
        arena.k(0).fill_(turn + 1)
        arena.k(1).fill_(3)
        device.synchronise()
        sums = [float(arena.k(layer).float().sum()) for layer in range(2)]
        assert ask_peer(Asked(handle, LAYOUT)) == {"sums": sums}
    arena.close()


def test_another_arena_than_announced_is_refused(device: CudaDevice) -> None:
    arena = CudaArena.create(device.memory, LAYOUT, 8, ID)
    other = msgspec.structs.replace(arena.handle("", ID), arena_id=ID + 1)
    assert ask_peer(Asked(other, LAYOUT)) == {"error": "transfer_failed"}
    arena.close()


def test_a_handle_of_freed_memory_is_refused(device: CudaDevice) -> None:
    arena = CudaArena.create(device.memory, LAYOUT, 8, ID)
    handle = arena.handle("", ID)
    arena.close()
    assert ask_peer(Asked(handle, LAYOUT)) == {"error": "transfer_failed"}


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
