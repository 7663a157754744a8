"""The kernels on a GPU against the plain reference on the CPU."""

import importlib.util
import math
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from shared.device.cuda import CudaDevice
from shared.engine.device.load import choose_kernels
from shared.kernels.gpu.plan import Plan, plan_of
from shared.kernels.types import AttentionBatch
from tests.unit.kernel_reference import Case, attention, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.keeps("threads", "fds", "memory"),
    pytest.mark.timeout(600),
]

POOLS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
MIXED = [(1, 1), (1, 300), (40, 40), (5, 129), (1, 4100), (17, 33), (200, 260)]


def moved(plan: Plan, place: torch.device) -> Plan:
    fields = ("tables", "query_start", "context", "decodes", "tiles")
    return structs.replace(plan, **{name: getattr(plan, name).to(place) for name in fields})


def run(device: CudaDevice, case: Case, **options: Any) -> torch.Tensor:
    kernels, _ = choose_kernels(device.place)
    plan = moved(plan_of(case.batch, case.k_pool.shape[0], case.k_pool.shape[1]), device.place)
    pools = (case.k_pool.to(device.place), case.v_pool.to(device.place))
    defaults = {"window": None, "softcap": None, "sinks": None}
    chosen = {**defaults, **options}
    if chosen["sinks"] is not None:
        chosen["sinks"] = chosen["sinks"].to(device.place)
    q = case.q.to(device.place)
    scaling = case.q.shape[2] ** -0.5
    return kernels.paged_attention(q, pools, plan, scaling=scaling, **chosen).float().cpu()


def check(device: CudaDevice, case: Case, **options: Any) -> None:
    expected = attention(case, case.q.shape[2] ** -0.5, **options)
    error = float((run(device, case, **options) - expected).abs().max())
    assert error <= TOLERANCE[case.k_pool.dtype], error


def in_format(case: Case) -> Case:
    return Case(case.q.to(case.k_pool.dtype), case.k_pool, case.v_pool, case.batch)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (80, 80), (256, 256)])
def test_decodes_and_chunks_in_one_batch(
    device: CudaDevice, pool: torch.dtype, dims: tuple[int, int]
) -> None:
    case = make_case(1, MIXED, heads=8, kv_heads=2, dims=dims, block_size=16, pool_dtype=pool)
    check(device, in_format(case))


@pytest.mark.parametrize("pool", POOLS)
def test_prompts_only(device: CudaDevice, pool: torch.dtype) -> None:
    """What FlashInfer gets, where it is installed."""
    lengths = [(64, 64), (65, 200), (129, 129), (2, 513)]
    case = make_case(
        2, lengths, heads=8, kv_heads=2, dims=(128, 128), block_size=16, pool_dtype=pool
    )
    check(device, in_format(case))


@pytest.mark.parametrize("window", [1, 16, 17, 256, 257, 1000])
def test_window_sees_exactly_its_newest_keys(device: CudaDevice, window: int) -> None:
    lengths = [(1, 1), (1, window), (1, window + 1), (40, window + 39), (1, 2100)]
    case = make_case(
        3, lengths, heads=4, kv_heads=2, dims=(64, 64), block_size=8, pool_dtype=torch.float32
    )
    check(device, case, window=window)


@pytest.mark.parametrize("seed", range(20))
def test_any_shape(device: CudaDevice, seed: int) -> None:
    source = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[int(source.integers(len(values)))]

    kv_heads = pick(1, 2, 3)
    heads = kv_heads * pick(1, 2, 3, 6)
    rows = [(int(source.integers(1, 150)), int(source.integers(0, 900))) for _ in range(4)]
    case = make_case(
        seed,
        [(1, rows[0][1] + 1), *((count, count + before) for count, before in rows[1:])],
        heads=heads,
        kv_heads=kv_heads,
        dims=(pick(1, 3, 8, 33, 64, 80, 128), pick(1, 5, 16, 20, 64, 96)),
        block_size=pick(1, 4, 5, 16, 32),
        pool_dtype=pick(*POOLS),
    )
    check(
        device,
        case,
        window=pick(None, int(source.integers(1, 400))),
        softcap=pick(None, 30.0),
        sinks=pick(None, torch.linspace(-2.0, 3.0, heads)),
    )


def test_contexts_past_the_small_partitions(device: CudaDevice) -> None:
    lengths = [(1, 64 * 256 + 2100), (1, 64 * 256 + 1)]
    case = make_case(
        5, lengths, heads=2, kv_heads=1, dims=(64, 64), block_size=32, pool_dtype=torch.float32
    )
    check(device, case)
    check(device, case, window=2500)


def test_result_does_not_depend_on_the_batch(device: CudaDevice) -> None:
    shape: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dims": (128, 128), "block_size": 16}
    case = in_format(make_case(3, MIXED, pool_dtype=torch.bfloat16, **shape))
    together = run(device, case)
    for s in range(len(MIXED)):
        first, last = case.batch.query_start[s : s + 2].tolist()
        alone = AttentionBatch(
            case.batch.tables[s : s + 1].contiguous(),
            torch.tensor([0, last - first]).int(),
            case.batch.context[s : s + 1].contiguous(),
        )
        part = structs.replace(case, q=case.q[first:last], batch=alone)
        if importlib.util.find_spec("flashinfer") is None or last - first == 1:
            assert torch.equal(run(device, part), together[first:last])


def test_nan_stays_in_its_sequence(device: CudaDevice) -> None:
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dims": (64, 64), "block_size": 4}
    case = make_case(4, [(1, 50), (1, 50), (20, 20)], pool_dtype=torch.float32, **shape)
    clean = run(device, case)
    case.k_pool[int(case.batch.tables[1, 3]), 1] = math.nan
    dirty = run(device, case)
    assert dirty[1].isnan().all()
    assert torch.equal(dirty[0], clean[0])
    assert torch.equal(dirty[2:], clean[2:])


@pytest.mark.parametrize("pool", POOLS)
def test_kv_write_fills_its_slots_only(device: CudaDevice, pool: torch.dtype) -> None:
    """On a GPU a slot past the pool is another tensor's memory."""
    kernels, _ = choose_kernels(device.place)
    k = torch.randn(3, 7, 20, device=device.place)
    v = torch.randn(3, 7, 9, device=device.place)
    whole_k = torch.zeros(6, 4, 3, 20, dtype=pool, device=device.place)
    whole_v = torch.zeros(6, 4, 3, 9, dtype=pool, device=device.place)
    slots = torch.tensor([15, 0, 7, 8, 3, 16, -1], dtype=torch.int32, device=device.place)
    kernels.kv_write(k.transpose(0, 1), v.transpose(0, 1), whole_k[:4], whole_v[:4], slots)
    for stored, fresh in ((whole_k, k), (whole_v, v)):
        expected = torch.zeros_like(stored).flatten(0, 1)
        expected[slots[:5].long()] = fresh.transpose(0, 1)[:5].to(pool)
        assert torch.equal(stored.flatten(0, 1), expected)
