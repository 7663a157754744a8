"""One worker's KV pool in device memory: a single allocation that peers can map.

It starts with a page that holds the arena's id, the canary by which a peer proves that it mapped
what was announced. Then, per layer with own storage, K ``[num_blocks + 1, block_size, heads,
k_dim]`` and V likewise, each on a page of its own. The block past ``num_blocks`` is scratch: rows
that only fill a graph up write there.
"""

from typing import Final

import torch
from msgspec import Struct

from shared.device.cuda_memory import CupyMemory
from shared.errors import IncompatiblePeer, ResourceMissing, TransferFailed
from shared.kv.layout import KvDtype, KvLayout

_PAGE: Final = 4096
_GRAIN: Final = 2 << 20
"""CUDA cuts smaller allocations out of pieces of this size and exports the whole piece."""
_TORCH: Final[dict[KvDtype, torch.dtype]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class CudaArenaHandle(Struct, frozen=True, kw_only=True):
    """What a peer needs to map an arena: CUDA's handle, the unit it lies on, and what is there."""

    handle: bytes
    unit: str
    size: int
    num_blocks: int
    arena_id: int
    layout: str


class CudaArena:
    """The pool, made by ``create`` (writable) or ``open`` (a peer's; nothing may write there)."""

    def __init__(
        self, memory: CupyMemory, address: int, layout: KvLayout, num_blocks: int, *, owned: bool
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.read_only = not owned
        self.size = cuda_arena_size(layout, num_blocks)
        self._memory = memory
        self._address: int | None = address
        self._header = memory.view(address, _PAGE)
        self._k: list[torch.Tensor] = []
        self._v: list[torch.Tensor] = []
        offset = _PAGE
        for index, kv in enumerate(layout.layers):
            owner = layout.owner(index)
            if owner != index:
                self._k.append(self._k[owner])
                self._v.append(self._v[owner])
                continue
            for pools, dim in ((self._k, kv.k_dim), (self._v, kv.v_dim)):
                shape = (num_blocks + 1, layout.block_size, kv.heads, dim)
                pools.append(self._tensor(address + offset, shape))
                offset += _pages(pools[-1].nbytes)

    @classmethod
    def create(
        cls, memory: CupyMemory, layout: KvLayout, num_blocks: int, arena_id: int
    ) -> "CudaArena":
        """Take the memory, zeroed.

        Raises:
            ResourceMissing: the device has not got it.
        """
        if num_blocks < 1:
            raise ResourceMissing("the KV memory holds no block")
        address = memory.take(cuda_arena_size(layout, num_blocks))
        arena = cls(memory, address, layout, num_blocks, owned=True)
        arena._header[:8] = _canary(arena_id).to(arena._header.device)
        return arena

    @classmethod
    def open(cls, memory: CupyMemory, handle: CudaArenaHandle, layout: KvLayout) -> "CudaArena":
        """Map a peer's arena after checking that it is the one described.

        Raises:
            IncompatiblePeer: another layout, or a size that cannot fit it.
            TransferFailed: CUDA refuses, or other memory is mapped than announced.
        """
        if handle.layout != layout.fingerprint() or handle.num_blocks < 1:
            raise IncompatiblePeer("the CUDA arena is of another layout than this model's")
        if handle.size != cuda_arena_size(layout, handle.num_blocks):
            raise IncompatiblePeer(
                f"the CUDA arena is announced with {handle.num_blocks} blocks in {handle.size} "
                "bytes, which is not this model's layout"
            )
        address = memory.open(handle.handle)
        arena = cls(memory, address, layout, handle.num_blocks, owned=False)
        if not torch.equal(arena._header[:8].cpu(), _canary(handle.arena_id)):
            arena.close()
            raise TransferFailed(
                "the mapped CUDA memory is another arena than announced (the owner restarted?)"
            )
        return arena

    def k(self, layer: int) -> torch.Tensor:
        """Return K ``[num_blocks + 1, block_size, heads, k_dim]`` of ``layer``, no copy."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """Return V ``[num_blocks + 1, block_size, heads, v_dim]`` of ``layer``, no copy."""
        return self._v[layer]

    def handle(self, unit: str, arena_id: int) -> CudaArenaHandle:
        """Return what a peer on this host needs to ``open`` this arena.

        Raises:
            ResourceMissing: CUDA does not export it; says why and what to do.
        """
        assert self._address is not None
        return CudaArenaHandle(
            handle=self._memory.export(self._address),
            unit=unit,
            size=self.size,
            num_blocks=self.num_blocks,
            arena_id=arena_id,
            layout=self.layout.fingerprint(),
        )

    def close(self) -> None:
        """Give the memory back; no tensor of the arena may be used afterwards."""
        address, self._address = self._address, None
        self._k, self._v = [], []
        if address is None:
            return
        if self.read_only:
            self._memory.shut(address)
        else:
            self._memory.give_back(address)

    def _tensor(self, address: int, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = _TORCH[self.layout.dtype]
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._memory.view(address, size).view(dtype).view(shape)


def cuda_arena_size(layout: KvLayout, num_blocks: int) -> int:
    """Return the bytes of an arena: header, ``num_blocks``, scratch block, and up to 2 MiB more."""
    size = _PAGE
    for layer in range(len(layout.layers)):
        if layout.owner(layer) == layer:
            size += _pages((num_blocks + 1) * layout.k_block_bytes(layer))
            size += _pages((num_blocks + 1) * layout.v_block_bytes(layer))
    return -(-size // _GRAIN) * _GRAIN


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _canary(arena_id: int) -> torch.Tensor:
    return torch.tensor(list(arena_id.to_bytes(8, "little")), dtype=torch.uint8)
