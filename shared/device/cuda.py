"""A CUDA device: torch computes, CuPy holds the KV memory."""

from collections.abc import Callable
from typing import Any

import torch

from shared.device.cuda_arena import CudaArena
from shared.device.cuda_memory import CupyMemory
from shared.device.cuda_pool import BOOK_LAYOUT, CudaPool
from shared.device.device import DeviceFacts, Event, Graph, KvMemory
from shared.kv.arena import KvArena
from shared.kv.layout import KvLayout


class _Replay:
    """A recorded CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class CudaDevice:
    """See ``Device``. Made by ``shared.device.open.open_device``, which checks first.

    ``memory`` is where arenas come from, those of peers as well.
    """

    def __init__(
        self,
        index: int,
        memory: CupyMemory,
        name: str,
        unit: str,
        capability: tuple[int, int] = (8, 0),
    ) -> None:
        self.place = torch.device("cuda", index)
        self.memory = memory
        self._name = name
        self._unit = unit
        self._capability = capability
        self._pool: Any = None

    def facts(self) -> DeviceFacts:
        """Return the maker's name and the memory as of now."""
        free, total = self.memory.free()
        return DeviceFacts(
            kind="cuda",
            name=self._name,
            memory_total=total,
            memory_free=free,
            unit=self._unit,
            capability=self._capability,
        )

    def kv_memory(self, layout: KvLayout, num_blocks: int) -> tuple[KvMemory, CudaPool]:
        """Take one allocation, and a small host arena for what a peer's CPU must read."""
        self.trim()
        book = KvArena.create(BOOK_LAYOUT, num_blocks)
        try:
            arena_id = book.descriptor().arena_id
            arena = CudaArena.create(self.memory, layout, num_blocks, arena_id)
        except BaseException:
            book.close()
            raise
        return arena, CudaPool(arena, book, self.memory, self._unit)

    def host_buffer(self, count: int) -> torch.Tensor:
        """Return pinned memory, from which copies do not hold this thread up."""
        return torch.zeros(count, dtype=torch.int32, pin_memory=True)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue the copy on the current stream."""
        target.copy_(source, non_blocking=True)

    def download(self, source: torch.Tensor) -> torch.Tensor:
        """Copy to pinned memory, which torch keeps for the next time, and wait."""
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        target.copy_(source, non_blocking=True)
        torch.cuda.current_stream(self.place).synchronize()
        return target

    def event(self) -> Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.place))
        return event

    def record(self, work: Callable[[], None]) -> Graph | None:
        """Capture ``work`` as a CUDA graph; all graphs of a device share one memory pool.

        They may, since they never run at the same time and leave nothing behind but what they
        write into memory made outside.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.place)
        current = torch.cuda.current_stream(self.place)
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                work()
        except BaseException:
            # torch ends a failed capture before it leaves the capture's stream, which throws.
            torch.cuda.set_stream(current)
            raise
        return _Replay(graph)

    def trim(self) -> None:
        """Empty torch's cache, of which CuPy and other processes get nothing."""
        torch.cuda.empty_cache()

    def synchronise(self) -> None:
        """Wait for every stream."""
        torch.cuda.synchronize(self.place)

    def set_threads(self, threads: int) -> None:
        """Set torch's threads, which sampling uses."""
        torch.set_num_threads(threads)
