"""The arena: what it maps, whom it refuses, what it leaves behind."""

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from shared.errors import DiptychError, IncompatiblePeer, ResourceMissing, TransferFailed
from shared.kv import arena as arena_module
from shared.kv.arena import KvArena, arena_size
from shared.kv.dtypes import TORCH_DTYPES
from shared.kv.layout import KvDtype, KvLayout, LayerKv
from shared.messages.prefill_decode import ArenaDescriptor
from tests.unit.kv_owner import LAYOUT, NUM_BLOCKS, open_of, owner_process, read_line


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/memfd:diptych-kv" in line]


@pytest.fixture
def arena() -> Iterator[KvArena]:
    arena = KvArena.create(LAYOUT, NUM_BLOCKS)
    yield arena
    arena.close()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8"])
def test_shapes_dtypes_and_no_overlap(dtype: KvDtype) -> None:
    """Guards region arithmetic: no tensor may share bytes with another, except aliases."""
    layout = KvLayout(dtype=dtype, block_size=3, layers=LAYOUT.layers)
    arena = KvArena.create(layout, 5)
    expected = TORCH_DTYPES[dtype]
    scale = 4 if dtype == "int8" else 0
    for i, layer in enumerate(layout.layers):
        assert arena.k(i).shape == (5, 3, layer.heads, layer.k_dim + scale)
        assert arena.v(i).shape == (5, 3, layer.heads, layer.v_dim + scale)
        assert arena.k(i).dtype == arena.v(i).dtype == expected
        assert arena.k(i).is_contiguous() and arena.v(i).is_contiguous()
    assert arena.generations.tolist() == [0] * 5
    arena.generations[:] = 7
    parts = [arena.k(0), arena.v(0), arena.k(2), arena.v(2)]
    for value, part in enumerate(parts, start=1):
        part.fill_(value)
    for value, part in enumerate(parts, start=1):
        assert torch.all(part == value)
    assert arena.generations.tolist() == [7] * 5
    assert arena.k(1).data_ptr() == arena.k(0).data_ptr()
    assert arena.v(1).data_ptr() == arena.v(0).data_ptr()
    k_bytes, v_bytes = arena.raw(2)
    assert k_bytes.tobytes() == arena.k(2).view(torch.uint8).numpy().tobytes()
    assert (k_bytes.shape[0], v_bytes.shape[0]) == (5, 5)
    arena.close()


def test_peer_process_reads_what_the_owner_wrote() -> None:
    """Guards the ipc path itself: another process's tensors, seen without a copy."""
    with owner_process("hold") as owner:
        arena = open_of(owner)
        read_line(owner)
        for block in range(NUM_BLOCKS):
            for layer in range(3):
                assert torch.all(arena.k(layer)[block] == block + 1)
                assert torch.all(arena.v(layer)[block] == -(block + 1))
        assert arena.generations.tolist() == [1] * NUM_BLOCKS
        arena.close()


def test_mapping_outlives_a_killed_owner_and_nothing_is_left() -> None:
    """Guards the crash rule: a reader in the middle of a copy survives the owner's kill -9."""
    shm, fds = set(os.listdir("/dev/shm")), open_fds()
    with owner_process("hold") as owner:
        arena = open_of(owner)
        read_line(owner)
        owner.kill()
        owner.wait(timeout=30)
        assert all(torch.all(arena.k(2)[b] == b + 1) for b in range(NUM_BLOCKS))
        assert arena.generations.tolist() == [1] * NUM_BLOCKS
        with pytest.raises(TransferFailed, match="cannot open"):
            KvArena.open(arena.descriptor(), LAYOUT)
        arena.close()
    assert mappings() == []
    assert open_fds() == fds
    assert set(os.listdir("/dev/shm")) == shm


def test_reader_cannot_write(arena: KvArena) -> None:
    """Guards the owner's KV against a bug in a reader."""
    reader = KvArena.open(arena.descriptor(), LAYOUT)
    assert reader.read_only and not arena.read_only
    with pytest.raises(ValueError, match="read-only"):
        reader.generations[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        reader.raw(0)[0][0] = 1
    assert sorted(line.split()[1] for line in mappings()) == ["r--s", "rw-s"]
    reader.close()


def test_create_open_close_leaks_nothing() -> None:
    """Guards against fd and mapping leaks, in the refused opens too."""
    fds = open_fds()
    for _ in range(200):
        owner = KvArena.create(LAYOUT, NUM_BLOCKS)
        reader = KvArena.open(owner.descriptor(), LAYOUT)
        wrong = msgspec.structs.replace(owner.descriptor(), arena_id=1)
        with pytest.raises(TransferFailed):
            KvArena.open(wrong, LAYOUT)
        reader.close()
        reader.close()
        owner.close()
        owner.close()
    assert open_fds() == fds
    assert mappings() == []


def test_close_with_a_tensor_still_out(arena: KvArena) -> None:
    """Guards against unmapping under an engine that still holds a view (segfault)."""
    tensor = arena.k(0)
    tensor.fill_(5)
    arena.close()
    assert torch.all(tensor == 5)
    del tensor
    assert mappings() == []


def test_too_little_memory_is_said_before_anything_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards the start-up sentence: no half-made arena, no kill for memory later."""
    fds = open_fds()
    monkeypatch.setattr(arena_module, "available_memory", lambda: 1 << 20)
    with pytest.raises(ResourceMissing, match=r"needs 17 MiB .* only 1 MiB .*`kv_memory`"):
        KvArena.create(LAYOUT, 20_000)
    with pytest.raises(ResourceMissing, match="holds no block"):
        KvArena.create(LAYOUT, 0)
    assert open_fds() == fds


def test_failing_memfd_is_a_missing_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards kernels and sandboxes that refuse: a sentence, not a traceback."""
    fds = open_fds()

    def refuse(*_: object) -> int:
        raise PermissionError("seccomp")

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refuse)
        with pytest.raises(ResourceMissing, match="cannot map"):
            KvArena.create(LAYOUT, 1)
        patch.setattr(os, "memfd_create", refuse)
        with pytest.raises(ResourceMissing, match="cannot create"):
            KvArena.create(LAYOUT, 1)
    assert open_fds() == fds


@contextlib.contextmanager
def forged(
    arena: KvArena,
    edit: Callable[[bytearray], None],
    *,
    size: int | None = None,
    seal: bool = True,
) -> Iterator[ArenaDescriptor]:
    """Yield a descriptor of a copy of ``arena`` whose bytes were edited."""
    content = bytearray(os.pread(arena.descriptor().fd, arena.descriptor().size, 0))
    edit(content)
    fd = os.memfd_create("diptych-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, content[:size])
    if seal:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 7)
    try:
        yield msgspec.structs.replace(arena.descriptor(), fd=fd)
    finally:
        os.close(fd)


def _put(at: int, fmt: str, value: object) -> Callable[[bytearray], None]:
    return lambda content: struct.pack_into(fmt, content, at, value)


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (_put(0, "<8s", b"NOTDIPTY"), TransferFailed, "bad magic"),
        (_put(8, "<I", 99), IncompatiblePeer, "version 99"),
        (_put(16, "<Q", 12345), TransferFailed, "owner restarted"),
        (_put(24, "<Q", 4096), TransferFailed, "contradicts"),
        (_put(32, "<Q", NUM_BLOCKS + 1), TransferFailed, "contradicts"),
        (_put(40, "<32s", b"\xff" * 32), IncompatiblePeer, "layout"),
    ],
)
def test_wrong_headers_are_refused(
    arena: KvArena,
    edit: Callable[[bytearray], None],
    error: type[DiptychError],
    message: str,
) -> None:
    """Guards scenarios 3 and 75: whatever sits at an old address is not taken for the pool."""
    with forged(arena, lambda content: None) as same:
        KvArena.open(same, LAYOUT).close()
    with forged(arena, edit) as other, pytest.raises(error, match=message):
        KvArena.open(other, LAYOUT)
    assert len(mappings()) == 1


def test_truncated_or_truncatable_memfd_is_refused(arena: KvArena) -> None:
    """Guards against SIGBUS: reading behind the end of a file kills the process."""
    for size in (0, 100, 8192, arena.descriptor().size - 1):
        with (
            forged(arena, lambda content: None, size=size) as short,
            pytest.raises(TransferFailed, match="bytes"),
        ):
            KvArena.open(short, LAYOUT)
    with (
        forged(arena, lambda content: None, seal=False) as loose,
        pytest.raises(TransferFailed, match="truncated"),
    ):
        KvArena.open(loose, LAYOUT)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.descriptor().fd, 4096)


def test_restarted_owner_with_the_same_pid_and_fd_is_refused(arena: KvArena) -> None:
    """Guards against pid reuse: same path in proc, another arena behind it."""
    later = KvArena.create(LAYOUT, NUM_BLOCKS)
    stale = msgspec.structs.replace(arena.descriptor(), fd=later.descriptor().fd)
    with pytest.raises(TransferFailed, match="another one than announced"):
        KvArena.open(stale, LAYOUT)
    later.close()


def test_foreign_files_are_not_even_opened(arena: KvArena) -> None:
    """Guards against hanging on a pipe or waking a device behind a reused fd number."""
    read_end, write_end = os.pipe()
    for fd in (read_end, write_end):
        with pytest.raises(TransferFailed, match="not a KV arena"):
            KvArena.open(msgspec.structs.replace(arena.descriptor(), fd=fd), LAYOUT)
        os.close(fd)
    for pid, fd in ((2**22 + 1, 3), (-1, 3), (os.getpid(), -1), (os.getpid(), 2**40)):
        with pytest.raises(TransferFailed, match="cannot open"):
            KvArena.open(msgspec.structs.replace(arena.descriptor(), pid=pid, fd=fd), LAYOUT)


def test_other_layout_of_the_same_size_is_refused(arena: KvArena) -> None:
    """Guards scenario 39: equal sizes do not mean equal meaning."""
    swapped = (LayerKv(1, 16, 8), LayerKv(1, 16, 8, shares=0), LayerKv(2, 8, 8))
    other = KvLayout(dtype="fp32", block_size=4, layers=swapped)
    assert arena_size(other, NUM_BLOCKS) == arena_size(LAYOUT, NUM_BLOCKS)
    with pytest.raises(IncompatiblePeer, match="layout"):
        KvArena.open(arena.descriptor(), other)


@pytest.mark.parametrize("change", [{"num_blocks": 0}, {"num_blocks": 99}, {"size": 2**62}])
def test_impossible_descriptors_are_refused(arena: KvArena, change: dict[str, int]) -> None:
    """Guards the mapping arithmetic against numbers from the wire."""
    with pytest.raises(IncompatiblePeer, match="not this model's layout"):
        KvArena.open(msgspec.structs.replace(arena.descriptor(), **change), LAYOUT)


def test_generations_are_little_endian_words_behind_the_header(arena: KvArena) -> None:
    """Guards the published format that other readers rely on."""
    arena.generations[1] = 0x0102
    raw = os.pread(arena.descriptor().fd, 8 * NUM_BLOCKS, 4096)
    assert np.frombuffer(raw, "<u8").tolist() == [0, 0x0102, *[0] * (NUM_BLOCKS - 2)]
