"""KV that codecs can take, the same in every process that asks with the same seed."""

import torch

from shared.kv.arena import KvArena


def fill_normal(arena: KvArena, seed: int) -> None:
    """Write noise into every block of every layer."""
    dice = torch.Generator().manual_seed(seed)
    for layer in range(len(arena.layout.layers)):
        for part in (arena.k(layer), arena.v(layer)):
            part.copy_(torch.randn(part.shape, generator=dice))
