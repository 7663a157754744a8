"""KV pools in private memory, shaped as a runner takes them."""

import torch

from shared.kv.dtypes import TORCH_DTYPES
from shared.kv.layout import KvLayout


def pools(layout: KvLayout, blocks: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return zeroed K and V pools [blocks, block_size, heads, width], one of each per layer.

    A layer that shares another's KV has that layer's tensors.
    """
    dtype = TORCH_DTYPES[layout.dtype]
    k: list[torch.Tensor] = []
    v: list[torch.Tensor] = []
    for index, layer in enumerate(layout.layers):
        owner = layout.owner(index)
        for known, dim in ((k, layer.k_dim), (v, layer.v_dim)):
            shape = (blocks, layout.block_size, layer.heads, layout.width(dim))
            known.append(torch.zeros(shape, dtype=dtype) if owner == index else known[owner])
    return k, v
