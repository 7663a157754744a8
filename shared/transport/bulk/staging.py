"""Memory that chunks pass through: kept by malloc instead of returned after each of them."""

import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MMAP_BYTES: Final = 32 << 20
_TRIM_BYTES: Final = 64 << 20


def keep_staging_memory() -> None:
    """Let this process's malloc keep up to 64 MiB of freed memory per arena.

    libzmq allocates each message anew. By default glibc gives its pages back once it is dropped,
    and the next one faults them in again, zeroed: half of the cost of receiving. glibc itself
    arrives at these two bounds in a process that frees a block of 32 MiB (mallopt(3)); another
    C library is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
