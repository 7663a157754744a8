"""The interface of a device."""

from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray

from shared.kv.layout import KvLayout
from shared.messages.prefill_decode import ArenaDescriptor


class DeviceFacts(Struct, frozen=True, kw_only=True):
    """``name`` is the maker's; memory is in bytes; ``unit`` tells slices and devices apart,
    ``capability`` is CUDA's compute capability.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    memory_total: int
    memory_free: int
    unit: str = ""
    capability: tuple[int, int] = (0, 0)


class Event(Protocol):
    """A point in a device's work."""

    def query(self) -> bool:
        """Say whether the work before it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until the work before it is done."""
        ...


class Graph(Protocol):
    """Recorded work on fixed memory."""

    def replay(self) -> None:
        """Do it again, with what the memory holds now."""
        ...


class KvMemory(Protocol):
    """A KV pool. ``k(layer)`` and ``v(layer)`` are [blocks, block_size, heads, dim] tensors on
    the device; they may hold more blocks than ``num_blocks``, which are nobody's.
    """

    layout: KvLayout
    num_blocks: int
    read_only: bool

    def k(self, layer: int) -> torch.Tensor:
        """Return K of a layer, no copy."""
        ...

    def v(self, layer: int) -> torch.Tensor:
        """Return V of a layer, no copy."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class SharedKv(Protocol):
    """A pool as other processes see it, and the threads that move KV. ``KvArena`` is one."""

    @property
    def layout(self) -> KvLayout:
        """What a block looks like."""
        ...

    @property
    def num_blocks(self) -> int:
        """How many blocks there are to give out."""
        ...

    @property
    def generations(self) -> NDArray[np.uint64]:
        """uint64 ``[num_blocks]`` in shared memory, moved on before a block is written anew."""
        ...

    def descriptor(self) -> ArenaDescriptor:
        """Return what a peer needs to read the pool."""
        ...

    def close(self) -> None:
        """Take back what peers see."""
        ...


class Device(Protocol):
    """Where tensors live and steps run. Use from one thread only."""

    @property
    def place(self) -> torch.device:
        """Where tensors of this device are."""
        ...

    def facts(self) -> DeviceFacts:
        """Return name and memory as of now."""
        ...

    def kv_memory(self, layout: KvLayout, num_blocks: int) -> tuple[KvMemory, SharedKv]:
        """Take KV memory, and what other processes see of it.

        Raises:
            ResourceMissing: the memory is not there.
        """
        ...

    def host_buffer(self, count: int) -> torch.Tensor:
        """Return int32 [count] in memory that ``upload`` is fastest from."""
        ...

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy from a host buffer, in order with the device's work; the buffer stays in use."""
        ...

    def download(self, source: torch.Tensor) -> torch.Tensor:
        """Return a copy in ordinary memory, once all work before it is done."""
        ...

    def event(self) -> Event:
        """Mark this point in the device's work."""
        ...

    def record(self, work: Callable[[], None]) -> Graph | None:
        """Record ``work``, which has run before; None where nothing is gained by that."""
        ...

    def trim(self) -> None:
        """Give back memory that is kept for later tensors, so that ``kv_memory`` can have it."""
        ...

    def synchronise(self) -> None:
        """Wait for all work."""
        ...

    def set_threads(self, threads: int) -> None:
        """Set the compute threads of this process."""
        ...
