"""Paged attention against a plain fp32 reference, on every tier and on the torch fallback."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.kernels.kv_rows import to_rows
from shared.kernels.ops import kv_write, paged_attention
from shared.kernels.types import AttentionBatch
from tests.unit.kernel_reference import Case, attention, make_case
from tests.unit.kernel_tiers import EVERY_TIER, NATIVE_TIERS, kernels
from tests.unit.kv_rows_equal import same_rows

__all__ = ["kernels"]

pytestmark = pytest.mark.timeout(400)  # the first use compiles

POOLS = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
MIXED = [(1, 1), (1, 300), (40, 40), (5, 129), (1, 1100), (17, 33), (200, 260)]


def _tolerance(tier: str, pool: torch.dtype) -> float:
    """The bf16 dot products round queries and weights to bf16, and of int8 pools keys and values;
    int8 keys meet queries of 16 bits elsewhere.
    """
    if tier in ("avx512bf16", "amx") and pool in (torch.bfloat16, torch.int8):
        return 4e-2
    return 1e-4 if tier != "torch" and pool == torch.int8 else 5e-5


def _check(tier: str, case: Case, **options: Any) -> None:
    scaling = case.q.shape[2] ** -0.5
    expected = attention(case, scaling, **options)
    actual = paged_attention(
        case.q,
        (case.k_pool, case.v_pool),
        case.batch,
        scaling=scaling,
        **options,
    )
    error = (actual - expected).abs().max().item()
    assert error <= _tolerance(tier, case.k_pool.dtype)


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("pool", POOLS)
def test_decodes_and_chunks_in_one_batch(kernels: str, pool: torch.dtype) -> None:
    """Every shape of work at once: partitions, merges, tiles that end inside a block."""
    case = make_case(
        1,
        MIXED,
        heads=9,
        kv_heads=3,
        dims=(64, 64),
        block_size=16,
        pool_dtype=pool,
    )
    _check(kernels, case)


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 128, 129, 1000])
def test_window_sees_exactly_its_newest_keys(kernels: str, window: int) -> None:
    """Off by one at the window's lower end, where whole tiles and partitions are skipped."""
    case = make_case(
        2,
        [(1, 1), (1, window), (1, window + 1), (40, window + 39), (3, 500), (130, 400)],
        heads=4,
        kv_heads=2,
        dims=(32, 32),
        block_size=8,
        pool_dtype=torch.float32,
    )
    _check(kernels, case, window=window)


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_shape(kernels: str, data: st.DataObject) -> None:
    """Odd dims, K and V of different width, any grouping, block size 1, windows, caps, sinks."""
    kv_heads = data.draw(st.integers(1, 3))
    heads = kv_heads * data.draw(st.integers(1, 6))
    lengths = data.draw(
        st.lists(
            st.tuples(st.integers(1, 40), st.integers(0, 300)).map(lambda p: (p[0], p[0] + p[1])),
            min_size=1,
            max_size=4,
        )
    )
    case = make_case(
        data.draw(st.integers(0, 1000)),
        lengths,
        heads=heads,
        kv_heads=kv_heads,
        dims=(
            data.draw(st.sampled_from([1, 3, 8, 12, 33, 64, 80, 128])),
            data.draw(st.sampled_from([1, 5, 16, 20, 64, 96])),
        ),
        block_size=data.draw(st.sampled_from([1, 4, 5, 16, 32])),
        pool_dtype=data.draw(st.sampled_from(POOLS)),
    )
    window = data.draw(st.none() | st.integers(1, 200))
    softcap = data.draw(st.none() | st.floats(1.0, 60.0))
    sinks = torch.linspace(-2.0, 3.0, heads) if data.draw(st.booleans()) else None
    _check(kernels, case, window=window, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("kernels", NATIVE_TIERS, indirect=True)
@pytest.mark.parametrize("pool", POOLS)
def test_result_does_not_depend_on_the_batch(kernels: str, pool: torch.dtype) -> None:
    """Greedy output must not change with what else happens to be in the step."""
    options = {"heads": 6, "kv_heads": 2, "dims": (64, 64), "block_size": 16}
    case = make_case(3, MIXED, pool_dtype=pool, **options)

    def run(batch: AttentionBatch, q: torch.Tensor) -> torch.Tensor:
        return paged_attention(q, (case.k_pool, case.v_pool), batch, scaling=0.125)

    together = run(case.batch, case.q)
    for s in range(len(MIXED)):
        first, last = case.batch.query_start[s : s + 2].tolist()
        alone = AttentionBatch(
            case.batch.tables[s : s + 1].contiguous(),
            torch.tensor([0, last - first]).int(),
            case.batch.context[s : s + 1].contiguous(),
        )
        assert torch.equal(run(alone, case.q[first:last]), together[first:last])


@pytest.mark.parametrize("kernels", NATIVE_TIERS, indirect=True)
@pytest.mark.parametrize("window", [0, 70])
def test_result_does_not_depend_on_the_chunks(kernels: str, window: int) -> None:
    """Where a prompt is cut decides which rows share a tile and which of their keys are masked."""
    options = {"heads": 6, "kv_heads": 2, "dims": (64, 64), "block_size": 16}
    case = make_case(5, [(330, 330)], pool_dtype=torch.bfloat16, **options)

    def run(first: int, last: int) -> torch.Tensor:
        batch = AttentionBatch(
            case.batch.tables, torch.tensor([0, last - first]).int(), torch.tensor([last]).int()
        )
        pools = (case.k_pool, case.v_pool)
        return paged_attention(case.q[first:last], pools, batch, scaling=0.125, window=window)

    whole = run(0, 330)
    for cuts in ((0, 96, 330), (0, 7, 130, 327, 330), (0, 33, 65, 201, 330)):
        parts = [run(first, last) for first, last in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
def test_nan_stays_in_its_sequence(kernels: str) -> None:
    """One request's NaN must fail that request only."""
    options = {"heads": 6, "kv_heads": 2, "dims": (16, 16), "block_size": 4}
    case = make_case(4, [(1, 50), (1, 50), (20, 20)], pool_dtype=torch.float32, **options)
    clean = paged_attention(case.q, (case.k_pool, case.v_pool), case.batch, scaling=0.25)
    case.k_pool[int(case.batch.tables[1, 3]), 1] = math.nan
    q = case.q.clone()
    q[-1] = math.inf
    dirty = paged_attention(q, (case.k_pool, case.v_pool), case.batch, scaling=0.25)
    assert dirty[1].isnan().all()
    assert dirty[-1].isnan().all()
    assert torch.equal(dirty[0], clean[0])
    assert torch.allclose(dirty[2:-1], clean[2:-1])


@pytest.mark.parametrize("kernels", NATIVE_TIERS, indirect=True)
@pytest.mark.parametrize("output", [torch.bfloat16, torch.float16])
def test_queries_of_any_float_type(kernels: str, output: torch.dtype) -> None:
    options = {"heads": 6, "kv_heads": 2, "dims": (64, 40), "block_size": 4}
    case = make_case(5, [(1, 50), (30, 60)], pool_dtype=torch.float32, **options)
    out = paged_attention(case.q.to(output), (case.k_pool, case.v_pool), case.batch, scaling=0.125)
    assert out.dtype == output
    assert (out.float() - attention(case, 0.125)).abs().max() < 2e-2


@pytest.mark.parametrize("kernels", NATIVE_TIERS, indirect=True)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tables": torch.tensor([[99, 0]]).int()}, "outside the pool"),
        ({"tables": torch.tensor([[-1, 0]]).int()}, "outside the pool"),
        ({"context": torch.tensor([9]).int()}, "shorter than its context"),
        ({"context": torch.tensor([1]).int()}, "shorter than its rows"),
        ({"query_start": torch.tensor([0, 3]).int()}, "end with the number of rows"),
        ({"query_start": torch.tensor([1, 2]).int()}, "begin with 0"),
        ({"context": torch.tensor([5])}, "int32"),
    ],
)
def test_batches_that_would_leave_the_pool_are_refused(
    kernels: str, change: dict[str, torch.Tensor], sentence: str
) -> None:
    """A wrong block table must raise, never read or write elsewhere."""
    fields = {
        "tables": torch.tensor([[0, 1]]).int(),
        "query_start": torch.tensor([0, 2]).int(),
        "context": torch.tensor([5]).int(),
    }
    pool = torch.zeros(2, 4, 1, 8)
    with pytest.raises(RuntimeError, match=sentence):
        paged_attention(
            torch.zeros(2, 1, 8), (pool, pool), AttentionBatch(**fields | change), scaling=1.0
        )


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_kv_write_fills_its_slots_only(
    kernels: str, pool: torch.dtype, source: torch.dtype
) -> None:
    """Heads in the wrong order, a slot beside the right one, or rounding other than torch's."""
    k, v = torch.randn(3, 5, 20).to(source), torch.randn(3, 5, 9).to(source)
    k_pool, v_pool = (to_rows(torch.zeros(4, 4, 3, dim), pool) for dim in (20, 9))
    slots = torch.tensor([15, 0, 7, 8, 3])
    kv_write(k.transpose(0, 1), v.transpose(0, 1), k_pool, v_pool, slots)
    for stored, fresh in ((k_pool, k), (v_pool, v)):
        expected = torch.zeros_like(stored).flatten(0, 1)
        expected[slots] = to_rows(fresh.transpose(0, 1), pool)
        assert same_rows(stored.flatten(0, 1), expected)


def test_shapes_are_known_without_running() -> None:
    """torch.compile and meta tensors need the fake implementations."""
    with torch.device("meta"):
        pool, ints = torch.empty(4, 4, 2, 8), torch.empty(1, 2, dtype=torch.int32)
        batch = AttentionBatch(ints, ints[0], ints[0, :1])
        q = torch.empty(3, 4, 8, dtype=torch.bfloat16)
        out = paged_attention(q, (pool, torch.empty(4, 4, 2, 6)), batch, scaling=1.0)
    assert out.shape == (3, 4, 6)
    assert out.dtype == torch.bfloat16
