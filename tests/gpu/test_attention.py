"""The kernels on a GPU against the plain reference on the CPU."""

import importlib.util
import math
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from shared.device.cuda import CudaDevice
from shared.device.names import FP8_CAPABILITY
from shared.engine.device.fp8_linear import Fp8Linear
from shared.engine.device.load import choose_kernels
from shared.kernels import fallback, fp8
from shared.kernels.gpu.plan import Plan, plan_of
from shared.kernels.kv_rows import to_rows
from shared.kernels.types import AttentionBatch
from tests.unit.kernel_reference import Case, attention, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.keeps("threads", "fds", "memory"),
    pytest.mark.timeout(600),
]

POOLS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
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


@pytest.fixture
def fp8_device(device: CudaDevice) -> CudaDevice:
    capability = device.facts().capability
    if capability < FP8_CAPABILITY:
        pytest.skip(f"fp8 needs compute capability 8.9, and this GPU has {capability}")
    return device


def in_format(case: Case) -> Case:
    return Case(case.q.to(case.k_pool.dtype), case.k_pool, case.v_pool, case.batch)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (192, 128), (80, 80), (256, 256), (512, 512)]
)
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


@pytest.mark.parametrize("query", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (512, 512)])
def test_fp8_rows_count_with_their_scales(
    fp8_device: CudaDevice, query: torch.dtype, dims: tuple[int, int]
) -> None:
    case = make_case(1, MIXED, heads=8, kv_heads=2, dims=dims, block_size=16, pool_dtype=FP8)
    case = structs.replace(case, q=case.q.to(query))
    expected = attention(case, dims[0] ** -0.5)
    assert float((run(fp8_device, case) - expected).abs().max()) <= TOLERANCE[query]


def test_fp8_rows_are_stored_as_plain_torch_stores_them(fp8_device: CudaDevice) -> None:
    kernels, place = choose_kernels(fp8_device.place)[0], fp8_device.place
    factors = 10.0 ** torch.arange(-3, 4)[None, :, None]
    k, v = (torch.randn(3, 7, dim) * factors for dim in (20, 8))
    expected = [to_rows(torch.zeros(6, 4, 3, dim), FP8) for dim in (20, 8)]
    pools = [pool.to(place) for pool in expected]
    slots = torch.tensor([15, 0, 7, 8, 3, 16, -1])
    there = (k.to(place).transpose(0, 1), v.to(place).transpose(0, 1))
    kernels.kv_write(*there, *(pool[:4] for pool in pools), slots.int().to(place))
    fallback.kv_write(k.transpose(0, 1)[:5], v.transpose(0, 1)[:5], *expected, slots[:5])
    for stored, wanted in zip(pools, expected, strict=True):
        assert torch.equal(stored.cpu().view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("shape", [(1, 4096, 4096), (7, 576, 1536), (300, 14336, 4096)])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_fp8_layers_multiply_what_was_rounded(
    fp8_device: CudaDevice, shape: tuple[int, int, int], bias: bool
) -> None:
    """Tokens rounded by the kernel, and torch's product of e4m3, against fp32 on the CPU."""
    kernels, place = choose_kernels(fp8_device.place)[0], fp8_device.place
    rows, inputs, outputs = shape
    plain = torch.nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)
    x = (torch.randn(rows, inputs) * 10.0 ** torch.linspace(-2, 2, rows)[:, None]).bfloat16()
    ours, theirs = (fp8.quantise_rows(part) for part in (x, plain.weight))
    found = kernels.quantise_rows(x.to(place))
    assert torch.equal(found[0].cpu().view(torch.uint8), ours[0].view(torch.uint8))
    assert torch.equal(found[1].cpu(), ours[1])
    layer = Fp8Linear(plain.to(place), kernels.quantise_rows)
    wide = [part.float() * scale for part, scale in (ours, theirs)]
    expected = wide[0] @ wide[1].T + (plain.bias.float().cpu() if bias else 0.0)
    error = (layer(x.to(place)).float().cpu() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) < 5e-3


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
