"""Ordinary memory that a GPU copies from and to by itself."""

import ctypes
import weakref
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shared.errors import ResourceMissing

_PORTABLE: Final = 1
"""Pinned for every device of the process."""

Bytes = NDArray[np.uint8]


def pinned_slabs(runtime: Any, index: int, count: int, size: int) -> list[Bytes]:  # noqa: ANN401
    """Return ``count`` pieces [size] of one pinned allocation, given back with the last view.

    Raises:
        ResourceMissing: the memory cannot be pinned.
    """
    runtime.setDevice(index)
    try:
        address = int(runtime.hostAlloc(count * size, _PORTABLE))
    except RuntimeError as error:
        raise ResourceMissing(
            f"cannot pin {count * size >> 20} MiB to stage KV in (`transfer.window` times "
            f"`transfer.chunk_size`): {error}"
        ) from error
    memory = (ctypes.c_uint8 * (count * size)).from_address(address)

    def give_back() -> None:
        runtime.setDevice(index)  # the last view may go in a thread that never saw this device
        runtime.freeHost(address)

    weakref.finalize(memory, give_back).atexit = False
    whole = np.frombuffer(memoryview(memory).cast("B"), dtype=np.uint8)
    return [whole[i * size : (i + 1) * size] for i in range(count)]


def address_of(buffer: Bytes) -> int:
    """Return where the buffer begins."""
    return int(buffer.ctypes.data)
