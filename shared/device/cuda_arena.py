"""One worker's KV pool in device memory: a single allocation that peers can map."""

import torch

from shared.device.cuda_layout import PAGE, Region, canary, cuda_arena_size, regions
from shared.device.cuda_memory import CupyMemory
from shared.errors import ResourceMissing
from shared.kv.dtypes import TORCH_DTYPES
from shared.kv.layout import KvLayout


class CudaArena:
    """The pool that this process owns; peers map it as a ``CudaMapping``."""

    def __init__(self, memory: CupyMemory, address: int, layout: KvLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.read_only = False
        self.size = cuda_arena_size(layout, num_blocks)
        self.address = address
        self.regions = regions(layout, num_blocks)
        self._memory = memory
        self._owned = True
        self._k: list[torch.Tensor] = []
        self._v: list[torch.Tensor] = []
        for index, (kv, (k, v)) in enumerate(zip(layout.layers, self.regions, strict=True)):
            owner = layout.owner(index)
            if owner == index:
                self._k.append(self._tensor(k, kv.heads, layout.width(kv.k_dim)))
                self._v.append(self._tensor(v, kv.heads, layout.width(kv.v_dim)))
            else:
                self._k.append(self._k[owner])
                self._v.append(self._v[owner])

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
        page = torch.frombuffer(bytearray(canary(arena_id)), dtype=torch.uint8)
        memory.view(address, PAGE).copy_(page)
        return cls(memory, address, layout, num_blocks)

    def k(self, layer: int) -> torch.Tensor:
        """Return K ``[num_blocks + 1, block_size, heads, width]`` of ``layer``, no copy."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """Return V ``[num_blocks + 1, block_size, heads, width]`` of ``layer``, no copy."""
        return self._v[layer]

    def close(self) -> None:
        """Give the memory back; no tensor of the arena may be used afterwards."""
        owned, self._owned = self._owned, False
        self._k, self._v = [], []
        if owned:
            self._memory.give_back(self.address)

    def _tensor(self, region: Region, heads: int, width: int) -> torch.Tensor:
        count = self.num_blocks + 1
        flat = self._memory.view(self.address + region.start, count * region.unit)
        shape = (count, self.layout.block_size, heads, width)
        return flat.view(TORCH_DTYPES[self.layout.dtype]).view(shape)
