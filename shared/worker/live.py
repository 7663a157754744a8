"""Which KV of a prompt its sliding-window layers still read when the next token comes. Pure."""

from collections.abc import Sequence

from shared.kv.layout import KvLayout

Window = int | None
"""Tokens that a layer's attention reaches back, the query's own included; None: all."""


def storage_windows(layout: KvLayout) -> tuple[Window, ...]:
    """Return, per layer, how far back anything reads the storage that the layer reads.

    A layer whose KV others share is read as far back as the one of them that sees farthest.
    """
    readers: dict[int, list[Window]] = {}
    for index, layer in enumerate(layout.layers):
        readers.setdefault(layout.owner(index), []).append(layer.window)
    return tuple(_farthest(readers[layout.owner(i)]) for i in range(len(layout.layers)))


def first_live_block(window: Window, tokens: int, block_size: int) -> int:
    """Return the first block that the query after ``tokens`` tokens, or a later one, reads."""
    if window is None:
        return 0
    return max(0, tokens - window + 1) // block_size


def usable_blocks(whole: Sequence[bool], window: int, block_size: int) -> int:
    """Return how many blocks of a cached prefix can be used.

    Blocks that are not ``whole`` lack layers of windows up to ``window``: they are good enough
    only where every query after the prefix is farther away than that.
    """
    for count in range(len(whole), 0, -1):
        if all(whole[first_live_block(window, count * block_size, block_size) : count]):
            return count
    return 0


def _farthest(windows: Sequence[Window]) -> Window:
    finite = [window for window in windows if window is not None]
    return max(finite) if len(finite) == len(windows) else None
