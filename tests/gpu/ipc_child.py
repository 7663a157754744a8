"""The owner in tests of CUDA IPC: fills a pool, tells what it is, and does what stdin says.

One line per order: ``reuse B`` gives block B away and writes it anew; the end of input ends it.
"""

import sys

import msgspec
import torch

from shared.device.cuda import CudaDevice
from shared.device.cuda_pool import CudaPool
from shared.device.open import open_device
from shared.kv.layout import KvLayout


class Asked(msgspec.Struct):
    """``device`` as in a deployment file."""

    device: str
    layout: KvLayout
    blocks: int


def content(layout: KvLayout, layer: int, part: int, blocks: int) -> torch.Tensor:
    """Return the bytes [blocks, bytes per block] that the owner's K (0) or V (1) has."""
    unit = layout.v_block_bytes(layer) if part else layout.k_block_bytes(layer)
    dice = torch.Generator().manual_seed(2 * layer + part)
    return torch.randint(0, 256, (blocks, unit), dtype=torch.uint8, generator=dice)


def main() -> None:
    asked = msgspec.json.decode(sys.argv[1], type=Asked)
    device = open_device(asked.device)
    assert isinstance(device, CudaDevice)
    memory, pool = device.kv_memory(asked.layout, asked.blocks)
    assert isinstance(pool, CudaPool)
    for layer in range(len(asked.layout.layers)):
        for part, tensor in enumerate((memory.k(layer), memory.v(layer))):
            there = tensor[: asked.blocks].view(asked.blocks, -1).view(torch.uint8)
            there.copy_(content(asked.layout, layer, part, asked.blocks))
    device.synchronise()
    print(msgspec.json.encode(pool.descriptor()).decode(), flush=True)
    for line in sys.stdin:
        block = int(line.split()[1])
        pool.generations[block] += 1
        memory.k(0)[block] = 0
        device.synchronise()
        print("done", flush=True)
    pool.close()


if __name__ == "__main__":
    main()
