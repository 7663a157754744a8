"""As much of CuPy as we use, over the machine's own memory, with every error it can answer.

Streams are late on purpose: a copy is done when an event behind it is asked for, and no sooner. So
whoever trusts bytes before the event finds those of before.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch


class FakeCudaError(RuntimeError):
    """As ``cupy.cuda.runtime.CUDARuntimeError``: the number is in ``status``."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class FakeRuntime:
    """``cupy.cuda.runtime``. ``fails`` maps a function's name to the status that it answers.

    ``mapped`` counts how often each address is open. ``hung``: events never pass. ``on_copy`` is
    called when copies are about to be done.
    """

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
        self.pinned: dict[int, Any] = {}
        self.mapped: dict[int, int] = {}
        self.no_peers = False
        self.hung = False
        self.on_copy: Callable[[], None] = lambda: None
        self.copies = 0
        self.streams: dict[int, list[tuple[int, int, int]]] = {}
        self.events: dict[int, tuple[int, int]] = {}
        self._numbers = iter(range(1, 1 << 30))
        self._lock = threading.RLock()

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
        handle = b"handle" + address.to_bytes(8, "little") + bytes(50)
        self.exported[handle] = address
        return handle

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        self._may("ipcOpenMemHandle")
        if len(handle) != 64:
            raise IndexError("not enough values found during array assignment")
        if handle not in self.exported or self.exported[handle] in self.taken:
            raise FakeCudaError(201, "cudaErrorDeviceUninitialized: invalid device context")
        address = self.exported[handle]
        self.mapped[address] = self.mapped.get(address, 0) + 1
        return address

    def ipcCloseMemHandle(self, address: int) -> None:
        self.mapped[address] -= 1
        if not self.mapped[address]:
            del self.mapped[address]

    def deviceCanAccessPeer(self, index: int, other: int) -> int:
        assert index != other
        return int(not self.no_peers)

    def hostAlloc(self, size: int, flags: int) -> int:
        self._may("hostAlloc")
        assert flags == 1
        memory = (ctypes.c_uint8 * size)()
        self.pinned[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def freeHost(self, address: int) -> None:
        del self.pinned[address]

    def streamCreateWithFlags(self, flags: int) -> int:
        assert flags == 1, "the default stream would wait for a blocking one"
        number = next(self._numbers)
        self.streams[number] = []
        return number

    def streamDestroy(self, stream: int) -> None:
        del self.streams[stream]

    def eventCreateWithFlags(self, flags: int) -> int:
        assert flags == 2
        number = next(self._numbers)
        self.events[number] = (0, 0)
        return number

    def eventDestroy(self, event: int) -> None:
        del self.events[event]

    def memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        self._may("memcpyAsync")
        assert kind == 4 and stream in self.streams and size > 0
        with self._lock:
            self.streams[stream].append((target, source, size))

    def memcpy2DAsync(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        *how: int,
    ) -> None:
        assert width <= min(target_pitch, source_pitch) and height > 1
        for row in range(height):
            there, here = target + row * target_pitch, source + row * source_pitch
            self.memcpyAsync(there, here, width, *how)

    def eventRecord(self, event: int, stream: int) -> None:
        self._may("eventRecord")
        with self._lock:
            self.events[event] = (stream, len(self.streams[stream]))

    def eventQuery(self, event: int) -> int:
        """Do what is queued before the event, then say that it has passed."""
        if "eventQuery" in self.fails:
            return self.fails["eventQuery"]
        if self.hung:
            return 600
        with self._lock:
            stream, count = self.events[event]
            queued = self.streams.get(stream, [])
            if count:
                self.on_copy()
            for target, source, size in queued[:count]:
                ctypes.memmove(target, source, size)
                self.copies += 1
            del queued[:count]
            for other, (of, at) in self.events.items():
                if of == stream:
                    self.events[other] = (of, max(0, at - count))
        return 0


class FakeCupy:
    """The module."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.cuda = self
        self.runtime = runtime


def view(address: int, size: int) -> torch.Tensor:
    """Return uint8 [size] over the machine's memory."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
