"""Blocks out of a mapped pool: every byte for any layout and order, and what is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.device.cuda_layout import PAGE, Region, stacks
from shared.device.cuda_mapping import PROBE_SLABS, CudaMapping
from shared.device.cuda_pool import CudaPool
from shared.device.cuda_stream import SideStream
from shared.errors import TransferFailed
from shared.kv.layout import KvLayout, LayerKv
from tests.unit.device_pair import LAYOUT, cuda_pool, fill, raw
from tests.unit.fake_cupy import FakeRuntime
from tests.unit.test_device_stage import layouts

BLOCKS = 12


@contextmanager
def mapped(layout: KvLayout) -> Iterator[tuple[CudaPool, CudaPool, SideStream, CudaMapping]]:
    """Return a filled pool, an empty one, and the first as the second's process maps it."""
    source = cuda_pool(FakeRuntime(), blocks=BLOCKS + 3, layout=layout)
    target = cuda_pool(FakeRuntime(), blocks=BLOCKS, layout=layout)
    fill(source, 5)
    stream = target.side_stream()
    pages = target.slabs(PROBE_SLABS, PAGE)
    mapping = CudaMapping.open(target, source.descriptor(), stream, pages)
    try:
        yield source, target, stream, mapping
    finally:
        mapping.close()
        stream.close()
        for pool in (source, target):
            pool.close()
            pool.arena.close()


numbers = st.integers(0, BLOCKS - 1)


@settings(max_examples=60, deadline=None)
@given(
    layout=layouts,
    pairs=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=BLOCKS),
    bounds=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_every_byte_comes_from_its_own_block(
    layout: KvLayout, pairs: list[tuple[int, int]], bounds: tuple[int, int]
) -> None:
    """Pools of two sizes, so that a region's place in the one is not its place in the other."""
    blocks = {ours: theirs for theirs, ours in pairs}
    first, end = sorted(min(bound, len(layout.layers)) for bound in bounds)
    with mapped(layout) as (source, target, stream, mapping):
        theirs, ours = list(blocks.values()), list(blocks)
        size = mapping.copy(stream, range(first, end), theirs, ours)
        stream.wait()
        assert not mapping.changed(theirs, [0] * len(theirs))
        assert size == len(ours) * sum(map(layout.layer_block_bytes, range(first, end)))
        for layer in range(len(layout.layers)):
            for there, here in zip(raw(source, layer), raw(target, layer), strict=True):
                expected = np.zeros_like(here)
                if first <= layer < end:
                    expected[ours] = there[theirs]
                assert np.array_equal(here, expected)


ALIKE = LayerKv(2, 8, 8)
TOWER = KvLayout(
    dtype="bf16",
    block_size=4,
    layers=(*(ALIKE,) * 4, LayerKv(2, 8, 8, shares=1), *(ALIKE,) * 2, LayerKv(1, 8, 4), ALIKE),
)


@pytest.mark.parametrize("bounds", [(0, 9), (0, 1), (1, 6), (4, 8), (7, 9)])
def test_layers_of_one_shape_are_one_copy_per_run(bounds: tuple[int, int]) -> None:
    """Guards launches by the thousand, and rows that begin where another layer's do."""
    theirs, ours = (3, 4, 5, 9, 0), (0, 1, 2, 7, 8)
    with mapped(TOWER) as (source, target, stream, mapping):
        calls: list[int] = []
        rows = stream.copy_rows

        def counted(*arguments: Any) -> None:
            calls.append(arguments[3])
            rows(*arguments)

        stream.copy_rows = counted  # type: ignore[method-assign]
        mapping.copy(stream, range(*bounds), theirs, ours)
        stream.wait()
        for layer in (0, 1, 2, 3, 5, 6, 7, 8):
            for there, here in zip(raw(source, layer), raw(target, layer), strict=True):
                expected = np.zeros_like(here)
                if bounds[0] <= layer < bounds[1]:
                    expected[list(ours)] = there[list(theirs)]
                assert np.array_equal(here, expected)
    own = [layer for layer in range(*bounds) if layer != 4]
    assert sum(calls) == 3 * 2 * len(own), "three runs of K and of V in every layer that has them"
    assert bounds != (0, 9) or len(calls) == 3 * 4, "six alike; two of their own; one more alike"


def test_rows_too_far_apart_for_cuda_are_copied_one_by_one() -> None:
    far = 1 << 31
    pairs = [(Region(at * far, 64), Region(at * 4096, 64)) for at in range(3)]
    assert [stack.rows for stack in stacks(pairs)] == [1, 1, 1]
    near = [(Region(at * (far - 1), 64), Region(at * 4096, 64)) for at in range(3)]
    assert [(stack.rows, stack.source_pitch) for stack in stacks(near)] == [(3, far - 1)]


def test_shared_layers_travel_once() -> None:
    with mapped(LAYOUT) as (_, _, stream, mapping):
        size = mapping.copy(stream, range(3), (1,), (2,))
        assert size == LAYOUT.block_bytes
        assert mapping.copy(stream, range(2, 3), (1,), (2,)) == 0
        stream.wait()


@pytest.mark.parametrize(
    ("layers", "theirs", "ours", "words"),
    [
        (range(4), (1,), (1,), "not a range of 3 layers"),
        (range(-1, 2), (1,), (1,), "not a range of 3 layers"),
        (range(0, 3, 2), (1,), (1,), "not a range of 3 layers"),
        (range(3), (1, 2), (1,), "2 source blocks for 1"),
        (range(3), (BLOCKS + 3,), (1,), "not in an arena of 15"),
        (range(3), (-1,), (1,), "not in an arena of 15"),
        (range(3), (1,), (BLOCKS,), "not in an arena of 12"),
    ],
)
def test_what_is_not_in_the_pools_is_refused_before_a_byte_moves(
    layers: range, theirs: tuple[int, ...], ours: tuple[int, ...], words: str
) -> None:
    """The announcement comes from another process: past the pool lies somebody else's memory."""
    with mapped(LAYOUT) as (_, target, stream, mapping):
        with pytest.raises(TransferFailed, match=words):
            mapping.copy(stream, layers, theirs, ours)
        stream.wait()
        assert not any(part.any() for layer in (0, 1) for part in raw(target, layer))
    with mapped(LAYOUT) as (_, _, _, mapping), pytest.raises(TransferFailed):
        mapping.changed((1, 2), (0,))
