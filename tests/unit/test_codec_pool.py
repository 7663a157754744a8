"""Tokens between block tables and codecs."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.kv.arena import KvArena
from shared.kv.codecs.frame import EncodedBlocks, KvShape
from shared.kv.codecs.pool import gather_tokens, scatter_tokens
from shared.kv.codecs.registry import make_codec
from shared.kv.layout import KvDtype, KvLayout, LayerKv

LAYOUT = KvLayout(dtype="bf16", block_size=4, layers=(LayerKv(2, 3, 5), LayerKv(2, 3, 5)))


@pytest.fixture
def arena() -> Iterator[KvArena]:
    arena = KvArena.create(LAYOUT, 8)
    for layer in range(2):
        for pool in (arena.k(layer), arena.v(layer)):
            pool.copy_(torch.randn(pool.shape))
    yield arena
    arena.close()


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 11])
def test_tokens_arrive_in_order_and_nothing_else_changes(arena: KvArena, tokens: int) -> None:
    """A block table is not ascending, and the last block has other tokens behind."""
    source, target = [6, 1, 3], [0, 7, 2]
    want_k = torch.cat([arena.k(1)[b] for b in source])[:tokens]
    untouched = [b for b in range(8) if b not in target[: -(-tokens // 4)]]
    before = arena.k(1).clone()
    k, v = gather_tokens(arena, 1, source, tokens)
    assert torch.equal(k, want_k)
    codec = make_codec("none", LAYOUT)
    frame = codec.encode(k, v, 1).pack()
    k, v = codec.decode(EncodedBlocks.unpack(frame), KvShape.of(LAYOUT, 1, tokens))
    scatter_tokens(arena, 1, target, k, v)
    again_k, again_v = gather_tokens(arena, 1, target, tokens)
    assert torch.equal(again_k, want_k) and torch.equal(again_v, v)
    assert torch.equal(arena.k(1)[untouched], before[untouched])
    last, used = target[(tokens - 1) // 4], (tokens - 1) % 4 + 1
    assert torch.equal(arena.k(1)[last, used:], before[last, used:])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_round_trip_through_a_file_is_bit_exact(dtype: KvDtype, tmp_path: Path) -> None:
    """Guards 35: pool, bytes, disk and back into other blocks; any bit pattern, NaN included."""
    layout = KvLayout(dtype=dtype, block_size=4, layers=(LayerKv(2, 3, 5), LayerKv(1, 7, 2)))
    source, target = KvArena.create(layout, 8), KvArena.create(layout, 8)
    dice = np.random.default_rng(3)
    codec = make_codec("none", layout)
    for layer in range(2):
        for part in source.raw(layer):
            part[:] = dice.integers(0, 256, part.shape, dtype=np.uint8)
        k, v = gather_tokens(source, layer, [6, 1, 3], 12)
        (tmp_path / f"{layer}").write_bytes(codec.encode(k, v, layer).pack())
    for layer in range(2):
        frame = EncodedBlocks.unpack((tmp_path / f"{layer}").read_bytes())
        k, v = codec.decode(frame, KvShape.of(layout, layer, 12))
        scatter_tokens(target, layer, [0, 7, 2], k, v)
        for theirs, ours in zip(source.raw(layer), target.raw(layer), strict=True):
            assert np.array_equal(theirs[[6, 1, 3]], ours[[0, 7, 2]])
    source.close()
    target.close()


def test_blocks_that_do_not_cover_the_tokens_are_refused(arena: KvArena) -> None:
    with pytest.raises(ValueError, match="2 blocks for 9 tokens"):
        gather_tokens(arena, 0, [1, 2], 9)
    with pytest.raises(ValueError, match="1 blocks for 5 tokens"):
        scatter_tokens(arena, 0, [1], torch.zeros(5, 2, 3), torch.zeros(5, 2, 5))


def test_a_peers_arena_is_not_written(arena: KvArena) -> None:
    """Writing to a read-only mapping kills the process with SIGSEGV."""
    theirs = KvArena.open(arena.descriptor(), LAYOUT)
    with pytest.raises(ValueError, match="read-only"):
        scatter_tokens(theirs, 0, [1], torch.zeros(1, 2, 3), torch.zeros(1, 2, 5))
    theirs.close()
