"""Our Triton kernels under Triton's interpreter; run by ``test_triton_kernels``.

The interpreter must be chosen before the kernels are imported, so this file has a process of its
own: ``TRITON_INTERPRET=1 pytest tests/unit/triton_interpreted.py``.
"""

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from shared.engine.device.kernels import DeviceKernels
from shared.engine.device.load import prepare_on
from shared.engine.prepared import LoadRequest
from shared.engine.probe import paged_logits
from shared.kernels import fallback, fp8
from shared.kernels.gpu import attention as kernels
from shared.kernels.gpu import decode
from shared.kernels.gpu.attention import kv_write, paged_attention
from shared.kernels.gpu.decode import partition_count
from shared.kernels.gpu.plain import PlainKernels
from shared.kernels.gpu.plan import plan_of
from shared.kernels.kv_rows import from_rows, to_rows
from shared.kernels.types import AttentionBatch
from tests.unit.device_engine import RecordingDevice
from tests.unit.engine_models import BLOCK, CONFIGS, save_model
from tests.unit.kernel_reference import Case, attention, make_case

POOLS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.9's interpreter multiplies the bits of bf16 matrices as integers; widen them."""

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: object) -> Any:
        wide = [
            (h.data.astype(np.uint32) << 16).view(np.float32)
            if h.data.dtype == np.uint16
            else h.data.astype(np.float32)
            for h in (a, b)
        ]
        return interpreter.TensorHandle(np.matmul(*wide) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def eighths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its conversions to e4m3 neither round ties to even nor carry into the exponent."""
    convert = interpreter._convert_float

    def converted(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (tl.float32, tl.float8e4nv):
            flat = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
            return flat.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if (source, target) == (tl.float8e4nv, tl.float32):
            flat = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8))
            return flat.view(torch.float8_e4m3fn).float().numpy().view(np.uint32)
        return convert(data, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def run(case: Case, **options: Any) -> torch.Tensor:
    plan = plan_of(case.batch, case.k_pool.shape[0], case.k_pool.shape[1])
    scaling = case.q.shape[2] ** -0.5
    return paged_attention(case.q, (case.k_pool, case.v_pool), plan, scaling=scaling, **options)


def check(case: Case, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Compare with the plain reference and with the CPU's torch kernel."""
    scaling = case.q.shape[2] ** -0.5
    found = run(case, **options).float()
    window, softcap, sinks = (options.get(n) for n in ("window", "softcap", "sinks"))
    pools = (case.k_pool, case.v_pool)
    other = fallback.paged_attention(
        case.q.float(), pools, case.batch, scaling, window or 0, softcap or 0.0, sinks
    )
    for expected in (attention(case, scaling, **options), other):
        error = float((found - expected).abs().max())
        assert error <= TOLERANCE[dtype], error


def half(case: Case, dtype: torch.dtype) -> Case:
    """Return the case with queries in the pools' own format, as a model of it has them."""
    return Case(case.q.to(dtype), case.k_pool, case.v_pool, case.batch)


@pytest.mark.parametrize("pool", POOLS[1:])
def test_decodes_and_chunks_in_one_batch(pool: torch.dtype) -> None:
    """Partitions, merges, tiles that end inside a block, rows of both kernels side by side."""
    lengths = [(1, 1), (20, 20), (1, 256), (1, 257), (65, 70)]
    shape: dict[str, Any] = {"heads": 3, "kv_heads": 1, "dims": (16, 16), "block_size": 16}
    check(half(make_case(1, lengths, pool_dtype=pool, **shape), pool), pool)


@pytest.mark.parametrize("query", [torch.bfloat16, torch.float32])
def test_fp8_rows_count_with_their_scales(query: torch.dtype) -> None:
    """A scale of the neighbour's row or head, or of K for V; rows are 4 elements wider than heads.

    Magnitudes differ from row to row by a factor of up to 10,000, so that a wrong scale shows.
    """
    lengths = [(1, 1), (20, 20), (1, 257), (17, 40)]
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dims": (24, 12), "block_size": 16}
    case = make_case(1, lengths, pool_dtype=FP8, **shape)
    for pool in (case.k_pool, case.v_pool):
        factors = 10.0 ** torch.randint(-4, 1, (*pool.shape[:3], 1))
        pool.copy_(to_rows(from_rows(pool) * factors, FP8))
    case = half(case, query)
    check(case, query)
    check(case, query, window=9, softcap=30.0, sinks=torch.linspace(-2.0, 3.0, 4))


@pytest.mark.parametrize("window", [1, 17, 257])
def test_window_sees_exactly_its_newest_keys(window: int) -> None:
    """Off by one at the window's lower end, where tiles and partitions are skipped."""
    lengths = [(1, 1), (1, window), (1, window + 1), (9, window + 8), (1, 520)]
    shape: dict[str, Any] = {"heads": 2, "kv_heads": 1, "dims": (16, 16), "block_size": 8}
    check(make_case(2, lengths, pool_dtype=torch.float32, **shape), window=window)


@pytest.mark.parametrize("seed", range(6))
def test_any_shape(seed: int) -> None:
    """Odd dims, K and V of different width, any grouping, block size 1, windows, caps, sinks."""
    source = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[int(source.integers(len(values)))]

    kv_heads = pick(1, 2)
    heads = kv_heads * pick(1, 2, 3)
    rows = [(int(source.integers(1, 30)), int(source.integers(0, 90))) for _ in range(3)]
    rows[0] = (1, rows[0][1])
    pool = pick(*POOLS)
    case = make_case(
        seed,
        [(count, count + before) for count, before in rows],
        heads=heads,
        kv_heads=kv_heads,
        dims=(pick(1, 3, 8, 33, 64, 80), pick(1, 5, 16, 20, 64)),
        block_size=pick(1, 4, 5, 16, 32),
        pool_dtype=pool,
    )
    check(
        case,
        window=pick(None, int(source.integers(1, 120))),
        softcap=pick(None, 30.0),
        sinks=pick(None, torch.linspace(-2.0, 3.0, heads)),
    )


def test_contexts_past_the_small_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds of the few large partitions, and more partitions than one merge step takes."""
    edge = 64 * 256
    counts = [partition_count(n) for n in (1, 256, 257, edge, edge + 1, edge + 2048, edge + 2049)]
    assert counts == [1, 1, 2, 64, 65, 65, 66]
    for name, keys in (("SMALL", 16), ("SMALL_COUNT", 20), ("LARGE", 128)):
        monkeypatch.setattr(decode, name, tl.constexpr(keys))
    shape: dict[str, Any] = {"heads": 1, "kv_heads": 1, "dims": (16, 16), "block_size": 32}
    case = make_case(5, [(1, 449), (1, 321), (1, 320)], pool_dtype=torch.float32, **shape)
    check(case)
    check(case, window=350)


def test_result_does_not_depend_on_the_batch() -> None:
    """Greedy output must not change with what else happens to be in the step."""
    lengths = [(1, 1), (1, 260), (20, 40), (70, 80)]
    shape: dict[str, Any] = {"heads": 2, "kv_heads": 1, "dims": (16, 16), "block_size": 16}
    case = make_case(3, lengths, pool_dtype=torch.float32, **shape)
    together = run(case)
    for s in range(len(lengths)):
        first, last = case.batch.query_start[s : s + 2].tolist()
        alone = AttentionBatch(
            case.batch.tables[s : s + 1].contiguous(),
            torch.tensor([0, last - first]).int(),
            case.batch.context[s : s + 1].contiguous(),
        )
        single = run(Case(case.q[first:last], case.k_pool, case.v_pool, alone))
        assert torch.equal(single, together[first:last])


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter
def test_nan_stays_in_its_sequence() -> None:
    """One request's NaN must fail that request only."""
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dims": (16, 16), "block_size": 4}
    case = make_case(4, [(1, 50), (1, 50), (20, 20)], pool_dtype=torch.float32, **shape)
    clean = run(case)
    case.k_pool[int(case.batch.tables[1, 3]), 1] = math.nan
    case.q[-1] = math.inf
    dirty = run(case)
    assert dirty[1].isnan().all()
    assert dirty[-1].isnan().all()
    assert torch.equal(dirty[0], clean[0])
    assert torch.allclose(dirty[2:-1], clean[2:-1])


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_kv_write_fills_its_slots_only(pool: torch.dtype, source: torch.dtype) -> None:
    """Heads in the wrong order, a slot beside the right one, or one past the pool written."""
    k, v = torch.randn(3, 7, 20).to(source), torch.randn(3, 7, 9).to(source)
    whole_k, whole_v = torch.zeros(6, 4, 3, 20, dtype=pool), torch.zeros(6, 4, 3, 9, dtype=pool)
    slots = torch.tensor([15, 0, 7, 8, 3, 16, -1])
    kv_write(k.transpose(0, 1), v.transpose(0, 1), whole_k[:4], whole_v[:4], slots)
    for stored, fresh in ((whole_k, k), (whole_v, v)):
        expected = torch.zeros_like(stored).flatten(0, 1)
        expected[slots[:5]] = fresh.transpose(0, 1)[:5].to(pool)
        torch.testing.assert_close(stored.flatten(0, 1), expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_fp8_rows_are_stored_with_their_scales(source: torch.dtype) -> None:
    """The byte beside the right one, a scale over all heads, or a slot past the pool written."""
    factors = 10.0 ** torch.arange(-3, 4)[None, :, None]
    k, v = ((torch.randn(3, 7, dim) * factors).to(source) for dim in (20, 8))
    k[0, 1] = 0.0
    pools = [to_rows(torch.zeros(6, 4, 3, dim), FP8) for dim in (20, 8)]
    expected = [pool.clone() for pool in pools]
    slots = torch.tensor([15, 0, 7, 8, 3, 16, -1])
    kv_write(k.transpose(0, 1), v.transpose(0, 1), *(pool[:4] for pool in pools), slots)
    rows = (k.transpose(0, 1)[:5], v.transpose(0, 1)[:5])
    fallback.kv_write(*rows, *expected, slots[:5])
    for stored, wanted in zip(pools, expected, strict=True):
        assert torch.equal(stored.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter
def test_rows_of_activations_are_quantised_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that depends on the neighbours, or on the first part of a long row alone."""
    monkeypatch.setattr(kernels, "_SPAN", 16)
    x = (torch.randn(6, 50) * 10.0 ** torch.arange(-3, 3)[:, None]).to(torch.bfloat16)
    x[1], x[2, 7], x[3, 40] = 0.0, math.nan, math.inf
    whole, scales = kernels.quantise_rows(x)
    expected, theirs = fp8.quantise_rows(x)
    clean = [0, 1, 4, 5]
    assert torch.equal(whole[clean].view(torch.uint8), expected[clean].view(torch.uint8))
    assert torch.equal(scales[clean], theirs[clean])
    assert (whole[2:4].float() * scales[2:4]).isnan().any(1).all()
    columns = x.t().contiguous().t()  # rows whose elements are not neighbours
    assert torch.equal(kernels.quantise_rows(columns)[0][0].float(), whole[0].float())


class Either(PlainKernels):
    """Plain kernels until ``chosen`` is others."""

    chosen: DeviceKernels = PlainKernels()

    def paged_attention(self, *arguments: Any, **options: Any) -> torch.Tensor:
        return self.chosen.paged_attention(*arguments, **options)

    def kv_write(self, *arguments: Any) -> None:
        self.chosen.kv_write(*arguments)

    def quantise_rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.chosen.quantise_rows(x)


def test_a_model_computes_with_them_what_it_does_with_plain_kernels(tmp_path: Path) -> None:
    """Windows, sinks, chunks and decodes in one model: the kernels as the runner calls them."""
    directory = save_model(tmp_path, CONFIGS["gpt_oss"]())
    either = Either()
    request = LoadRequest(directory, "fp32", "fp32", BLOCK, None)
    prepared, runner = prepare_on(RecordingDevice(), request, either, "either")
    logits = []
    for either.chosen in (PlainKernels(), cast(DeviceKernels, kernels)):
        logits.append(
            torch.cat(paged_logits(runner, prepared.facts.layout, prepared.facts.embeddings))
        )
    assert torch.allclose(*logits, rtol=1e-4, atol=1e-5)
