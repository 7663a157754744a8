"""KV from one dtype to another: on every tier, and between arenas."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import IncompatiblePeer
from shared.kernels.kv_rows import from_rows, to_rows
from shared.kernels.ops import kv_convert
from shared.kv.arena import KvArena
from shared.kv.copy import copy_blocks
from shared.kv.dtypes import TORCH_DTYPES
from shared.kv.layout import KvDtype, KvLayout, LayerKv
from shared.messages.hello import CONVERTIBLE
from tests.unit.kernel_tiers import EVERY_TIER, kernels
from tests.unit.kv_rows_equal import same_rows

__all__ = ["kernels"]

pytestmark = pytest.mark.timeout(400)  # the first use compiles

DTYPES = tuple(dtype for dtype in get_args(KvDtype) if dtype in CONVERTIBLE)
LAYERS = (LayerKv(3, 20, 7), LayerKv(3, 20, 7, shares=0), LayerKv(1, 64, 64, window=8))


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_blocks_of_any_two_dtypes(kernels: str, data: st.DataObject) -> None:
    """Guards rows that end inside a vector, blocks out of order, and blocks nobody asked for."""
    first, second = data.draw(st.sampled_from([(a, b) for a in DTYPES for b in DTYPES]))
    dim, heads, size = (data.draw(st.sampled_from(s)) for s in ([1, 5, 16, 33, 64], [1, 3], [1, 4]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    scale = 10.0 ** data.draw(st.integers(-4, 4))
    fresh = torch.randn(6, size, heads, dim) * scale
    if data.draw(st.booleans()):
        fresh[2, 0, 0, dim // 2] = math.nan
    source = to_rows(fresh, TORCH_DTYPES[first])
    target = to_rows(torch.ones(7, size, heads, dim), TORCH_DTYPES[second])
    theirs = data.draw(st.permutations(range(6)))[: data.draw(st.integers(0, 6))]
    ours = data.draw(st.permutations(range(7)))[: len(theirs)]
    before = target.clone()
    lists = [torch.tensor(blocks, dtype=torch.int64) for blocks in (theirs, ours)]
    kv_convert(source, target, *lists)
    expected = source if first == second else to_rows(from_rows(source), target.dtype)
    assert same_rows(target[ours], expected[theirs])
    rest = [b for b in range(7) if b not in ours]
    assert torch.equal(target[rest], before[rest])


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
def test_what_a_round_trip_may_cost(kernels: str) -> None:
    """Guards a scale of another row, and rounding that drifts with every hand-over."""
    blocks = torch.arange(4)

    def through(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        target = to_rows(torch.zeros(4, 4, 2, 40), dtype)
        kv_convert(source, target, blocks, blocks)
        return target

    bf16 = torch.randn(4, 4, 2, 40).bfloat16()
    assert torch.equal(through(through(bf16, torch.float32), torch.bfloat16), bf16)
    int8 = through(bf16, torch.int8)
    step = bf16.float().abs().amax(-1, keepdim=True) / 127
    assert bool(((from_rows(int8) - bf16.float()).abs() <= 0.5001 * step).all())
    again = through(through(int8, torch.float32), torch.int8)
    assert torch.equal(again[..., :40], int8[..., :40])


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
def test_blocks_outside_a_pool_are_refused(kernels: str) -> None:
    """Guards memory that is not the pool's from a wrong block number."""
    if kernels == "torch":
        pytest.skip("torch checks its indices itself")
    source, target = torch.zeros(2, 4, 1, 8), torch.zeros(3, 4, 1, 8, dtype=torch.bfloat16)
    one = torch.tensor([1])
    for theirs, ours in ((torch.tensor([2]), one), (one, torch.tensor([-1])), (one, one.int())):
        with pytest.raises(RuntimeError, match="block"):
            kv_convert(source, target, theirs, ours)
    with pytest.raises(RuntimeError, match="more than their blocks"):
        kv_convert(source, torch.zeros(3, 4, 1, 9), one, one)


@pytest.mark.parametrize(
    ("first", "second"), [("bf16", "int8"), ("int8", "bf16"), ("fp32", "fp16")]
)
def test_arenas_of_two_dtypes(first: KvDtype, second: KvDtype) -> None:
    """Guards layers that share, layers not asked for, and neighbours of the blocks."""
    layout = KvLayout(dtype=first, block_size=5, layers=LAYERS)
    source, target = KvArena.create(layout, 12), KvArena.create(layout.with_dtype(second), 9)
    for layer, kv in enumerate(LAYERS):
        for pool, dim in ((source.k(layer), kv.k_dim), (source.v(layer), kv.v_dim)):
            pool.copy_(to_rows(torch.randn(12, 5, kv.heads, dim), pool.dtype))
    before = [[part.copy() for part in target.raw(layer)] for layer in range(3)]
    theirs, ours = [4, 5, 6, 11, 10, 0], [1, 2, 3, 4, 8, 0]
    assert copy_blocks(source, target, range(2), theirs, ours) == 6 * layout.layer_block_bytes(0)
    assert all(np.array_equal(x, y) for x, y in zip(before[2], target.raw(2), strict=True))
    copy_blocks(source, target, range(2, 3), theirs, ours)
    rest = [block for block in range(9) if block not in ours]
    for layer in range(3):
        for name in ("k", "v"):
            read = from_rows(getattr(source, name)(layer)[theirs])
            written = getattr(target, name)(layer)[ours]
            assert same_rows(written, to_rows(read, written.dtype))
        for old, now in zip(before[layer], target.raw(layer), strict=True):
            assert np.array_equal(now[rest], old[rest])
    other = KvArena.create(KvLayout(dtype=second, block_size=4, layers=LAYERS), 2)
    with pytest.raises(IncompatiblePeer):
        copy_blocks(source, other, range(1), [0], [0])
    for arena in (source, target, other):
        arena.close()
