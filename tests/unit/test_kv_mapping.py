"""Memory files mapped where huge pages fit, and pools that have their memory from the start."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shared.kv import mapping
from shared.kv.mapping import map_file, take_huge_pages

HUGE = 2 << 20
NAME = "diptych-mapping-test"
SIZE = 5 * HUGE + 3 * 4096


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count(f"/memfd:{NAME}")


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def taken(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_a_mapping_is_aligned_and_shared_and_ends_with_its_last_view(file: int) -> None:
    """Guards an unaligned reader, a reader that writes, and memory unmapped under an array."""
    mine, theirs = map_file(file, SIZE, writable=True), map_file(file, SIZE, writable=False)
    assert address(mine) % HUGE == address(theirs) % HUGE == 0
    assert len(mine) == len(theirs) == SIZE and theirs.readonly
    mine[SIZE - 1] = 7
    assert theirs[SIZE - 1] == 7
    kept = np.frombuffer(mine, dtype=np.uint8)[SIZE - 4096 :]
    del mine, theirs
    assert mappings() == 1 and kept[-1] == 7
    del kept
    assert mappings() == 0


def test_nothing_is_left_of_a_mapping_that_failed() -> None:
    """Guards address space that is reserved for ever, and a failure that is taken for memory."""
    before = Path("/proc/self/maps").read_text().count("\n")
    for fd, size in ((-1, SIZE), (0, 1 << 62)):
        with pytest.raises(OSError, match="Errno"):
            map_file(fd, size, writable=True)
    assert Path("/proc/self/maps").read_text().count("\n") <= before + 1


def test_memory_is_taken_at_once_where_the_kernel_can(file: int) -> None:
    """Guards a pool whose pages are faulted in by the first requests that use them."""
    view = map_file(file, SIZE, writable=True)
    take_huge_pages(view, patience=60)
    if taken(file) < HUGE:
        pytest.skip("this kernel gives no memory in advance (Linux 5.14 does)")
    assert taken(file) >= SIZE // HUGE * HUGE
    assert not np.frombuffer(view, dtype=np.uint8).any()


@pytest.mark.parametrize(
    "refused", [(mapping._COLLAPSE,), (mapping._COLLAPSE, mapping._POPULATE_WRITE)]
)
def test_older_kernels_have_the_same_pool(
    file: int, refused: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards workers that start on new kernels only, or whose pool is not zero elsewhere."""
    asked = []
    libc = mapping._libc()

    class Older:
        def madvise(self, address: int, size: int, advice: int) -> int:
            asked.append(advice)
            return -1 if advice in refused else int(libc.madvise(address, size, advice))

    view = map_file(file, SIZE, writable=True)
    monkeypatch.setattr(mapping, "_libc", Older)
    monkeypatch.setattr(mapping, "_PIECE", 2 * HUGE)
    take_huge_pages(view, patience=60)
    assert asked == [mapping._COLLAPSE] + [mapping._POPULATE_WRITE] * (
        3 if len(refused) == 1 else 1
    )
    assert not np.frombuffer(view, dtype=np.uint8).any()


def test_a_start_does_not_wait_for_a_large_pool(file: int) -> None:
    """Guards a worker with much KV memory that is not ready for a minute."""
    view = map_file(file, SIZE, writable=True)
    take_huge_pages(view, patience=0)
    assert taken(file) == 0
    view[SIZE - 1] = 1
    assert taken(file) > 0
