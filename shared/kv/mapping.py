"""Memory files, mapped so that the kernel can back them with huge pages.

KV is read a few KiB here and a few KiB there over the whole pool: with 4 KiB pages the address
translation takes a sixth of the bandwidth away, and each page costs a fault when it is first used.
"""

import ctypes
import functools
import mmap
import os
import time
import weakref
from typing import Final

import numpy as np

_HUGE: Final = 2 << 20
"""Bytes of a huge page on x86-64, and on arm64 with small pages of 4 KiB."""
_PIECE: Final = 32 * _HUGE
_PATIENCE: Final = 2.0
_NO_ACCESS: Final = 0  # PROT_NONE
_MAP_FIXED: Final = 0x10
_FAILED: Final = ctypes.c_void_p(-1).value
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14
_COLLAPSE: Final = 25  # MADV_COLLAPSE, Linux 6.1: unlike MADV_HUGEPAGE it needs no shmem_enabled


def map_file(fd: int, size: int, *, writable: bool) -> memoryview:
    """Map the first ``size`` bytes of a memory file at an address that is a multiple of 2 MiB.

    The mapping goes away with the last view of it. ``mmap.mmap`` chooses an address of its own.

    Raises:
        OSError: there is no address space, or the file may not be mapped.
    """
    libc = _libc()
    room = size + _HUGE
    start = libc.mmap(None, room, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if start == _FAILED:
        raise _os_error()
    base = -(-start // _HUGE) * _HUGE
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if libc.mmap(base, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) == _FAILED:
        error = _os_error()
        libc.munmap(start, room)
        raise error
    end = base + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    for first, behind in ((start, base), (end, start + room)):
        if behind > first:
            libc.munmap(first, behind - first)
    memory = (ctypes.c_ubyte * size).from_address(base)
    # Not at the interpreter's end: threads may still read, and the process' memory goes anyway.
    weakref.finalize(memory, libc.munmap, base, size).atexit = False
    view = memoryview(memory).cast("B")
    return view if writable else view.toreadonly()


def take_huge_pages(memory: memoryview, patience: float = _PATIENCE) -> None:
    """Give a new mapping its memory now, in huge pages where the kernel can, else in small ones.

    For at most ``patience`` seconds, so that a pool of many GiB delays no start: what is left,
    and everything on a kernel that can do neither, gets small pages as it is first written.
    """
    data = np.frombuffer(memory, dtype=np.uint8)
    libc, base = _libc(), data.ctypes.data
    whole = data.size // _HUGE * _HUGE
    advice = _COLLAPSE
    until = time.monotonic() + patience
    for offset in range(0, whole, _PIECE):
        if time.monotonic() >= until:
            return
        size = min(_PIECE, whole - offset)
        # Of a huge page that holds one small page only that one has to be copied into it.
        data[offset : offset + size : _HUGE] = 0
        if advice == _COLLAPSE and libc.madvise(base + offset, size, _COLLAPSE) != 0:
            advice = _POPULATE_WRITE
        if advice == _POPULATE_WRITE and libc.madvise(base + offset, size, advice) != 0:
            return


def _os_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = (address, size, number, number, number, ctypes.c_int64)
    libc.mmap.restype = address
    libc.munmap.argtypes = (address, size)
    libc.madvise.argtypes = (address, size, number)
    return libc
