"""Tokens of a sequence in and out of a KV pool, between block tables and codecs."""

from collections.abc import Sequence

import torch

from shared.kernels.kv_rows import from_rows, to_rows
from shared.kv.arena import KvArena


def gather_tokens(
    arena: KvArena, layer: int, blocks: Sequence[int], tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of K and V [tokens, heads, width] of the first ``tokens`` in ``blocks``.

    Raises:
        ValueError: the blocks do not cover the tokens.
    """
    index = _index(arena, blocks, tokens)
    k, v = arena.k(layer)[index], arena.v(layer)[index]
    return k.flatten(0, 1)[:tokens], v.flatten(0, 1)[:tokens]


def scatter_tokens(
    arena: KvArena, layer: int, blocks: Sequence[int], k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write K and V [tokens, heads, width] into ``blocks``; what follows in the last one stays.

    They are converted where the pool is of another dtype.

    Raises:
        ValueError: the blocks do not cover the tokens, or the arena is read-only.
    """
    if arena.read_only:
        raise ValueError("the arena is a peer's and read-only")
    tokens, size = k.shape[0], arena.layout.block_size
    index = _index(arena, blocks, tokens)
    whole = tokens // size
    for pool, given in ((arena.k(layer), k), (arena.v(layer), v)):
        values = given
        if given.dtype != pool.dtype:
            values = to_rows(from_rows(given), pool.dtype)
        pool[index[:whole]] = values[: whole * size].reshape(whole, size, *values.shape[1:])
        if tokens > whole * size:
            pool[index[whole], : tokens - whole * size] = values[whole * size :]


def _index(arena: KvArena, blocks: Sequence[int], tokens: int) -> torch.Tensor:
    needed = -(-tokens // arena.layout.block_size)
    if not 1 <= needed <= len(blocks):
        raise ValueError(f"{len(blocks)} blocks for {tokens} tokens")
    return torch.tensor(blocks[:needed], dtype=torch.int64)
