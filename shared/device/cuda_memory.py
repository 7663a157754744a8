"""Device memory of our own by way of CuPy, and what CUDA says when it is not to be had.

torch's caching allocator hands out parts of larger allocations, and CUDA exports whole ones: a
peer would map memory that is none of its business, or be refused. So KV lies in an allocation
that torch has never seen.
"""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

from shared.device.cuda_stream import PATIENCE, SideStream
from shared.device.pinned import Bytes, pinned_slabs
from shared.errors import DeviceLost, NoPeerAccess, ResourceMissing, TransferFailed

Cupy: TypeAlias = Any
"""The module ``cupy``; it is not typed, and tests hand in another."""

View = Callable[[int, int], torch.Tensor]
"""From address and bytes to a uint8 tensor over that memory, which it does not own."""

_OUT_OF_MEMORY: Final = 2
_NO_PEER_ACCESS: Final = 217
_REFUSALS: Final = (201, 205, 800, 801, 999)
"""Invalid context, mapping failed, not permitted, not supported, unknown: what
containers and platforms without CUDA IPC answer."""


class CupyMemory:
    """Allocations of one device. ``sliced``: the device is a MIG slice, which exports nothing.

    ``patience``: seconds that copies may take before the device counts as hung.

    Raises:
        ResourceMissing: from every call that takes memory; says what to do.
    """

    def __init__(
        self, cupy: Cupy, index: int, view: View, *, sliced: bool, patience: float = PATIENCE
    ) -> None:
        self._runtime = cupy.cuda.runtime
        self._index = index
        self._view = view
        self.sliced = sliced
        self._patience = patience

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
        if self.sliced:
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

        A handle that is open already gives the same address, and is closed as often as opened.
        CUDA lets no process open its own.

        Raises:
            NoPeerAccess: the memory is another GPU's, which this one cannot reach.
            TransferFailed: CUDA refuses, or the owner is gone.
        """
        self._runtime.setDevice(self._index)
        try:
            return int(self._runtime.ipcOpenMemHandle(handle))
        except RuntimeError as error:
            if getattr(error, "status", None) == _NO_PEER_ACCESS:
                raise NoPeerAccess(f"cuda:{self._index} cannot reach the peer's GPU") from error
            raise TransferFailed(self._refused("maps no peer's memory", error)) from error

    def shut(self, address: int) -> None:
        """Unmap what ``open`` returned."""
        self._runtime.setDevice(self._index)
        self._runtime.deviceSynchronize()
        self._runtime.ipcCloseMemHandle(address)

    def require_access(self, unit: str) -> None:
        """Check that this device can read the memory of GPU ``unit``.

        A GPU that this process does not see cannot be asked about: mapping its memory will tell.

        Raises:
            NoPeerAccess: it cannot.
        """
        for other in range(int(self._runtime.getDeviceCount())):
            if other == self._index or self.unit(other) != unit:
                continue
            if not int(self._runtime.deviceCanAccessPeer(self._index, other)):
                raise NoPeerAccess(
                    f"cuda:{self._index} has no peer access to cuda:{other} (another PCIe root, "
                    "or switched off by the platform)"
                )

    def unit(self, index: int | None = None) -> str:
        """Return the UUID of this device, or of another that the process sees."""
        facts = self._runtime.getDeviceProperties(self._index if index is None else index)
        return unit_of(facts)

    def side_stream(self, lost: Callable[[DeviceLost], None]) -> SideStream:
        """Return a new stream for copies; ``lost`` is told when they fail."""
        return SideStream(self._runtime, self._index, lost, patience=self._patience)

    def pinned(self, count: int, size: int) -> list[Bytes]:
        """Return ``count`` pieces of ``size`` bytes that the device copies from and to itself."""
        return pinned_slabs(self._runtime, self._index, count, size)

    def _refused(self, what: str, error: RuntimeError) -> str:
        hint = (
            "; containers must share the host's IPC and PID namespaces (`ipc: host`, "
            "`pid: host`), or set `transfer.path: host`"
            if getattr(error, "status", None) in _REFUSALS
            else ""
        )
        return f"cuda:{self._index} {what} (CUDA IPC): {error}{hint}"


def unit_of(facts: dict[str, Any]) -> str:
    """Return the UUID out of a device's properties, as text."""
    unit = facts.get("uuid", b"")
    return unit.hex() if isinstance(unit, bytes) else str(unit)
