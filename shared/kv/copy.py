"""Pulling blocks from a peer's arena, and proving afterwards that they were the right ones."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shared.errors import IncompatiblePeer, TransferFailed
from shared.kernels.ops import kv_convert
from shared.kv.arena import KvArena
from shared.kv.dtypes import TORCH_DTYPES
from shared.kv.layout import KvLayout


def copy_blocks(
    source: KvArena,
    target: KvArena,
    layers: range,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
) -> int:
    """Copy whole blocks, ``source_blocks[i]`` to ``target_blocks[i]``; return the bytes read.

    K and V of every layer in ``layers`` with own storage are copied, neighbouring blocks in
    one go, or converted where the arenas differ in dtype. What arrives is unverified: call
    ``verify_generations`` before it is used.

    Raises:
        IncompatiblePeer: the arenas differ in more than dtype.
        TransferFailed: a layer or block does not exist, or the lists differ in length.
    """
    if source.layout.with_dtype(target.layout.dtype) != target.layout:
        raise IncompatiblePeer("the two KV arenas differ in layout")
    require_places(
        layers,
        len(source.layout.layers),
        (source_blocks, source.num_blocks),
        (target_blocks, target.num_blocks),
    )
    owners = [layer for layer in layers if source.layout.owner(layer) == layer]
    if source.layout.dtype != target.layout.dtype:
        lists = [torch.tensor(b, dtype=torch.int64) for b in (source_blocks, target_blocks)]
        for layer in owners:
            kv_convert(source.k(layer), target.k(layer), *lists)
            kv_convert(source.v(layer), target.v(layer), *lists)
        return len(source_blocks) * sum(map(source.layout.layer_block_bytes, owners))
    runs = list(merge_runs(source_blocks, target_blocks))
    copied = 0
    for layer in owners:
        for theirs, ours in zip(source.raw(layer), target.raw(layer), strict=True):
            for start, to, count in runs:
                ours[to : to + count] = theirs[start : start + count]
                copied += count * ours.shape[1]
    return copied


def land_blocks(
    data: NDArray[np.uint8],
    layout: KvLayout,
    target: KvArena,
    place: tuple[int, int],
    blocks: Sequence[int],
) -> None:
    """Convert whole blocks that came as bytes of ``layout`` into ``blocks`` of the target.

    ``data`` is one piece of ``len(blocks)`` blocks, writable; ``place`` is the layer, and 0 for
    its K or 1 for its V. ``layout`` differs from the target's in dtype only.
    """
    layer, part = place
    pool = (target.k, target.v)[part](layer)
    kv = layout.layers[layer]
    width = layout.width((kv.k_dim, kv.v_dim)[part])
    elements = torch.from_numpy(data.reshape(-1)).view(TORCH_DTYPES[layout.dtype])
    source = elements.view(len(blocks), layout.block_size, kv.heads, width)
    kv_convert(source, pool, torch.arange(len(blocks)), torch.tensor(blocks, dtype=torch.int64))


def verify_generations(
    source: KvArena, blocks: Sequence[int], generations: Sequence[int]
) -> list[int]:
    """Return the blocks that were allocated anew since ``generations`` was announced.

    The owner moves a generation on before it writes, so an unchanged one read AFTER the
    copy means that the copied bytes are those announced.

    Raises:
        TransferFailed: a block does not exist, or the lists differ in length.
    """
    if len(blocks) != len(generations):
        raise TransferFailed(f"{len(generations)} generations for {len(blocks)} blocks")
    _require_blocks(blocks, source.num_blocks)
    now = source.generations[list(blocks)].tolist()
    return [
        block for block, seen, told in zip(blocks, now, generations, strict=True) if seen != told
    ]


def require_places(
    layers: range,
    num_layers: int,
    source: tuple[Sequence[int], int],
    target: tuple[Sequence[int], int],
) -> None:
    """Check what a copy names; ``source`` and ``target`` are blocks and the pool's number of them.

    Raises:
        TransferFailed: a layer or block does not exist, or the lists differ in length.
    """
    if not 0 <= layers.start <= layers.stop <= num_layers or layers.step != 1:
        raise TransferFailed(f"{layers} is not a range of {num_layers} layers")
    if len(source[0]) != len(target[0]):
        raise TransferFailed(f"{len(source[0])} source blocks for {len(target[0])} target blocks")
    _require_blocks(*source)
    _require_blocks(*target)


def _require_blocks(blocks: Sequence[int], num_blocks: int) -> None:
    for block in blocks:
        if not 0 <= block < num_blocks:
            raise TransferFailed(f"block {block} is not in an arena of {num_blocks} blocks")


def merge_runs(
    source_blocks: Sequence[int], target_blocks: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Merge pairs that ascend together into (source start, target start, count)."""
    start = to = count = 0
    for theirs, ours in zip(source_blocks, target_blocks, strict=True):
        if count and (theirs, ours) == (start + count, to + count):
            count += 1
            continue
        if count:
            yield start, to, count
        start, to, count = theirs, ours, 1
    if count:
        yield start, to, count
