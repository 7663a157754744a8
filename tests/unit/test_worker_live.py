"""What of a prompt's KV a sliding window still reads: told one by one, by brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.ids import BlockHash
from shared.kv.block_pool import BlockPool
from shared.kv.layout import KvLayout, LayerKv
from shared.worker.live import first_live_block, storage_windows, usable_blocks

HASH = BlockHash(bytes(16))


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 6))
def test_every_block_that_is_read_is_live_and_no_other(
    window: int, tokens: int, block_size: int
) -> None:
    """Guards the borders n*B-1, n*B, n*B+1 of window, block and prompt (37)."""
    first = first_live_block(window, tokens, block_size)
    positions = {k for k in range(tokens) if tokens - k < window}
    blocks = {k // block_size for k in positions}
    assert blocks <= set(range(first, -(-tokens // block_size)))
    assert not blocks or first == min(blocks)


def test_without_a_window_everything_is_live() -> None:
    assert first_live_block(None, 1000, 16) == 0


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 30), st.integers(1, 5))
def test_a_cached_prefix_is_used_as_far_as_its_window_is_whole(
    whole: list[bool], window: int, block_size: int
) -> None:
    count = usable_blocks(whole, window, block_size)
    for n in range(len(whole), -1, -1):
        tokens = n * block_size
        needed = {k // block_size for k in range(tokens) if tokens - k < window}
        if all(whole[block] for block in needed):
            assert count >= n
            break
    tokens = count * block_size
    assert all(whole[k // block_size] for k in range(tokens) if tokens - k < window)


@pytest.mark.parametrize(
    ("layers", "windows"),
    [
        ([(8, None), (None, None)], (8, None)),
        ([(8, None), (4, 0)], (8, 8)),
        ([(4, None), (8, 0)], (8, 8)),
        ([(4, None), (None, 0)], (None, None)),
    ],
)
def test_storage_is_read_as_far_back_as_by_any_layer_that_shares_it(
    layers: list[tuple[int | None, int | None]], windows: tuple[int | None, ...]
) -> None:
    kv = tuple(LayerKv(1, 4, 4, window=window, shares=shares) for window, shares in layers)
    assert storage_windows(KvLayout(dtype="bf16", block_size=4, layers=kv)) == windows


def test_a_whole_block_takes_the_place_of_one_that_lacks_layers() -> None:
    """Guards a prefix that stays unusable although it was computed in full since."""
    pool = BlockPool(3, 4)
    first, second, third = pool.allocate(3)
    pool.seal(first, HASH, whole=False)
    pool.seal(second, HASH, whole=False)
    assert pool.match([HASH]) == [first] and not pool.is_whole(first)
    pool.release([first])
    pool.seal(third, HASH)
    pool.check()
    assert pool.match([HASH]) == [third] and pool.is_whole(third)
    assert (pool.stats().cached, pool.stats().free) == (0, 1)
    pool.release([second, third])
    assert (pool.stats().cached, pool.stats().free) == (1, 2)
    pool.check()
