"""The CPU: memory is the machine's, and work is done when the call returns."""

import os
import platform
from collections.abc import Callable

import torch

from shared.device.device import DeviceFacts, Event, Graph, KvMemory
from shared.kv.arena import KvArena
from shared.kv.layout import KvLayout
from shared.kv.memory import available_memory


class _Done:
    """An event whose work is over."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class CpuDevice:
    """See ``Device``."""

    place = torch.device("cpu")

    def facts(self) -> DeviceFacts:
        """Return the processor's name and the memory this process may take."""
        return DeviceFacts(
            kind="cpu",
            name=platform.processor() or platform.machine(),
            memory_total=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            memory_free=available_memory(),
        )

    def kv_memory(self, layout: KvLayout, num_blocks: int) -> tuple[KvMemory, KvArena]:
        """Return one arena as both: peers read the very memory."""
        arena = KvArena.create(layout, num_blocks)
        return arena, arena

    def host_buffer(self, count: int) -> torch.Tensor:
        """Return ordinary memory."""
        return torch.zeros(count, dtype=torch.int32)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    def download(self, source: torch.Tensor) -> torch.Tensor:
        """Copy now."""
        return source.clone()

    def event(self) -> Event:
        """Return an event that has happened."""
        return _Done()

    def record(self, work: Callable[[], None]) -> Graph | None:
        """Record nothing: launches cost next to nothing here."""
        return None

    def trim(self) -> None:
        """Return at once: the allocator's memory is the machine's."""

    def synchronise(self) -> None:
        """Return at once."""

    def set_threads(self, threads: int) -> None:
        """Set torch's threads."""
        torch.set_num_threads(threads)
