"""As much of CuPy as we use, over the machine's own memory, with every error it can answer."""

import ctypes
from typing import Any

import torch


class FakeCudaError(RuntimeError):
    """As ``cupy.cuda.runtime.CUDARuntimeError``: the number is in ``status``."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class FakeRuntime:
    """``cupy.cuda.runtime``. ``fails`` maps a function's name to the status that it answers."""

    exported: dict[bytes, int] = {}
    """What all processes of the machine have exported."""

    def __init__(self, *, version: int = 12080, name: bytes = b"NVIDIA H200") -> None:
        self.version = version
        self.name = name
        self.capability = (9, 0)
        self.devices = 2
        self.room = 64 << 20
        self.fails: dict[str, int] = {}
        self.taken: dict[int, Any] = {}
        self.mapped: list[int] = []

    def _may(self, function: str) -> None:
        if function in self.fails:
            raise FakeCudaError(self.fails[function], f"cudaError {self.fails[function]}")

    def runtimeGetVersion(self) -> int:
        return self.version

    def getDeviceCount(self) -> int:
        self._may("getDeviceCount")
        return self.devices

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        major, minor = self.capability
        return {"name": self.name, "major": major, "minor": minor, "uuid": bytes([index]) * 16}

    def setDevice(self, index: int) -> None:
        assert 0 <= index < self.devices

    def memGetInfo(self) -> tuple[int, int]:
        used = sum(len(memory) for memory in self.taken.values())
        return self.room - used, self.room

    def malloc(self, size: int) -> int:
        self._may("malloc")
        if size > self.memGetInfo()[0]:
            raise FakeCudaError(2, "cudaErrorMemoryAllocation: out of memory")
        memory = (ctypes.c_uint8 * size)()
        ctypes.memset(memory, 0xAB, size)
        self.taken[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def memset(self, address: int, value: int, size: int) -> None:
        ctypes.memset(address, value, size)

    def free(self, address: int) -> None:
        del self.taken[address]

    def deviceSynchronize(self) -> None:
        return

    def ipcGetMemHandle(self, address: int) -> bytes:
        self._may("ipcGetMemHandle")
        assert address in self.taken, "CUDA exports whole allocations only"
        handle = b"handle" + address.to_bytes(8, "little")
        self.exported[handle] = address
        return handle

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        self._may("ipcOpenMemHandle")
        if handle not in self.exported:
            raise FakeCudaError(201, "cudaErrorDeviceUninitialized: invalid device context")
        self.mapped.append(self.exported[handle])
        return self.exported[handle]

    def ipcCloseMemHandle(self, address: int) -> None:
        self.mapped.remove(address)


class FakeCupy:
    """The module."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.cuda = self
        self.runtime = runtime


def view(address: int, size: int) -> torch.Tensor:
    """Return uint8 [size] over the machine's memory."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
