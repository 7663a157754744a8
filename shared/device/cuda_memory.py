"""Device memory of our own by way of CuPy, and what CUDA says when it is not to be had.

torch's caching allocator hands out parts of larger allocations, and CUDA exports whole ones: a
peer would map memory that is none of its business, or be refused. So KV lies in an allocation
that torch has never seen.
"""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

from shared.errors import ResourceMissing, TransferFailed

Cupy: TypeAlias = Any
"""The module ``cupy``; it is not typed, and tests hand in another."""

View = Callable[[int, int], torch.Tensor]
"""From address and bytes to a uint8 tensor over that memory, which it does not own."""

_OUT_OF_MEMORY: Final = 2
_REFUSALS: Final = (201, 205, 217, 800, 801, 999)
"""Invalid context, mapping failed, no peer access, not permitted, not supported, unknown: what
containers and platforms without CUDA IPC answer."""


class CupyMemory:
    """Allocations of one device. ``sliced``: the device is a MIG slice, which exports nothing.

    Raises:
        ResourceMissing: from every call that takes memory; says what to do.
    """

    def __init__(self, cupy: Cupy, index: int, view: View, *, sliced: bool) -> None:
        self._runtime = cupy.cuda.runtime
        self._index = index
        self._view = view
        self._sliced = sliced

    def free(self) -> tuple[int, int]:
        """Return free and total bytes."""
        self._runtime.setDevice(self._index)
        free, total = self._runtime.memGetInfo()
        return int(free), int(total)

    def take(self, size: int) -> int:
        """Return the address of ``size`` zeroed bytes, alone in their allocation."""
        self._runtime.setDevice(self._index)
        try:
            address = int(self._runtime.malloc(size))
        except RuntimeError as error:
            if getattr(error, "status", None) != _OUT_OF_MEMORY:
                raise ResourceMissing(
                    f"cuda:{self._index} gives no memory for KV: {error}"
                ) from error
            free, total = self.free()
            raise ResourceMissing(
                f"KV needs {size >> 20} MiB of cuda:{self._index}, which has {free >> 20} of "
                f"{total >> 20} MiB free; lower `kv_memory` or end what else uses the GPU"
            ) from error
        self._runtime.memset(address, 0, size)
        self._runtime.deviceSynchronize()
        return address

    def give_back(self, address: int) -> None:
        """Free what ``take`` returned, after all work on it."""
        self._runtime.setDevice(self._index)
        self._runtime.deviceSynchronize()
        self._runtime.free(address)

    def view(self, address: int, size: int) -> torch.Tensor:
        """Return uint8 [size] over memory that must outlive it."""
        return self._view(address, size)

    def export(self, address: int) -> bytes:
        """Return the handle by which another process maps the allocation at ``address``."""
        if self._sliced:
            raise ResourceMissing(
                f"cuda:{self._index} is a MIG slice, and CUDA shares no memory between processes "
                "there; set `transfer.path: host`"
            )
        try:
            return bytes(self._runtime.ipcGetMemHandle(address))
        except RuntimeError as error:
            raise ResourceMissing(self._refused("exports no memory", error)) from error

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; its address here.

        Raises:
            TransferFailed: CUDA refuses, or the owner is gone.
        """
        self._runtime.setDevice(self._index)
        try:
            return int(self._runtime.ipcOpenMemHandle(handle))
        except RuntimeError as error:
            raise TransferFailed(self._refused("maps no peer's memory", error)) from error

    def shut(self, address: int) -> None:
        """Unmap what ``open`` returned."""
        self._runtime.setDevice(self._index)
        self._runtime.deviceSynchronize()
        self._runtime.ipcCloseMemHandle(address)

    def _refused(self, what: str, error: RuntimeError) -> str:
        hint = (
            "; containers must share the host's IPC and PID namespaces (`ipc: host`, "
            "`pid: host`), or set `transfer.path: host`"
            if getattr(error, "status", None) in _REFUSALS
            else ""
        )
        return f"cuda:{self._index} {what} (CUDA IPC): {error}{hint}"
