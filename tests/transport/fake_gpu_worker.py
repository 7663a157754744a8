"""A worker process whose GPUs are stand-ins: ``python -m tests.transport.fake_gpu_worker MODULE …``

Device memory is a memory file, and its handle says where another process finds it: so mapping,
copying, generations and ends are those of two real processes. Copies are late on purpose, and a
mapping cannot be written to.
"""

import contextlib
import mmap
import os
import runpy
import struct
import sys
from typing import Final

import numpy as np

from shared.device import open as devices
from shared.device.cuda import CudaDevice
from shared.device.cuda_memory import CupyMemory
from shared.device.device import KvMemory, SharedKv
from shared.device.names import device_index
from shared.engine.device import load
from shared.kernels.gpu.plain import PlainKernels
from shared.kv.layout import KvLayout
from tests.unit.device_engine import RecordingDevice
from tests.unit.fake_cupy import FakeCudaError, FakeCupy, FakeRuntime, view

_HANDLE: Final = struct.Struct("<QQQ")  # pid, descriptor, size


class SharedRuntime(FakeRuntime):
    """Allocations are memory files; a handle is opened through proc."""

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[int, tuple[int, int]] = {}
        self._opened: dict[bytes, int] = {}

    def malloc(self, size: int) -> int:
        file = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
        memory = np.frombuffer(mmap.mmap(file, size), dtype=np.uint8)
        address = int(memory.ctypes.data)
        self.taken[address], self._files[address] = memory, (file, size)
        return address

    def free(self, address: int) -> None:
        super().free(address)
        os.close(self._files.pop(address)[0])

    def ipcGetMemHandle(self, address: int) -> bytes:
        return _HANDLE.pack(os.getpid(), *self._files[address]).ljust(64, b"\0")

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        pid, descriptor, size = _HANDLE.unpack_from(handle)
        if pid == os.getpid():
            raise FakeCudaError(201, "no process opens its own handle")
        address = self._opened.get(handle)
        if address is None:
            try:
                file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise FakeCudaError(201, "the owner is gone") from error
            with contextlib.closing(os.fdopen(file, "rb")) as opened:
                mapped = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ)
            memory = np.frombuffer(mapped, dtype=np.uint8)
            address = self._opened[handle] = int(memory.ctypes.data)
            self.pinned[address] = memory
        self.mapped[address] = self.mapped.get(address, 0) + 1
        return address

    def ipcCloseMemHandle(self, address: int) -> None:
        super().ipcCloseMemHandle(address)
        if address not in self.mapped:
            del self.pinned[address]
            self._opened = {h: a for h, a in self._opened.items() if a != address}


class FakeGpu(RecordingDevice):
    """Computes on the CPU, with KV where a GPU has it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        memory = CupyMemory(FakeCupy(SharedRuntime()), index, view, sliced=False)
        self._cuda = CudaDevice(index, memory, "stand-in", memory.unit())

    def kv_memory(self, layout: KvLayout, num_blocks: int) -> tuple[KvMemory, SharedKv]:
        return self._cuda.kv_memory(layout, num_blocks)


def open_fake(name: str) -> FakeGpu:
    """Stand in for ``open_device``."""
    index = device_index(name)
    assert index is not None
    return FakeGpu(index)


def main() -> None:
    """Run the module named first with everything after it as its arguments."""
    load.open_device = devices.open_device = open_fake
    load.choose_kernels = lambda place: (PlainKernels(), "torch attention")
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
