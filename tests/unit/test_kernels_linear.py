"""Linear layers, norms and gates against torch, on every tier and on the torch fallback."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from shared.kernels.int4 import on_grid
from shared.kernels.ops import PackedLinear, rms_norm, rotary_table, silu_mul
from shared.kernels.types import GROUP, INT4, INT8, LinearKind
from tests.unit.kernel_tiers import EVERY_TIER, NATIVE_TIERS, kernels

__all__ = ["kernels"]

pytestmark = pytest.mark.timeout(400)  # the first use compiles

GROUPED: tuple[LinearKind, ...] = ("int8", "int8a16", "int4", "int4a16")
KINDS: tuple[LinearKind, ...] = ("fp32", "bf16", *GROUPED)
TOLERANCE = {
    "fp32": 2e-6,
    "bf16": 8e-3,
    "int8": 8e-3,
    "int8a16": 6e-3,
    "int4": 8e-2,
    "int4a16": 8e-2,
}


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def _bound(x: torch.Tensor, weight: torch.Tensor, kind: LinearKind) -> torch.Tensor:
    """Return how far rounding of inputs and weights can move each result."""
    if kind in INT4:
        return _int4_bound(x, weight, 1.001 / (254 if kind == "int4" else 65_024))
    if kind in INT8:  # half a step of each, steps being the group's largest / 127 (or / 32,512)
        half, finer = 1.001 / 254, 1.001 / (254 if kind == "int8" else 65_024)
        padded = (functional.pad(t.abs(), (0, -t.shape[1] % GROUP)) for t in (x, weight))
        rows, columns = (t.view(len(t), -1, GROUP).amax(-1) for t in padded)
        return rows @ columns.t() * GROUP * (half + finer + half * finer)
    return (x.abs() @ weight.abs().t()) * (2**-6.9 if kind == "bf16" else 2**-20)


def _int4_bound(x: torch.Tensor, weight: torch.Tensor, finest: float) -> torch.Tensor:
    """Squared errors of a group are at most those of 15 equal steps between its ends."""
    rows, columns = (functional.pad(t, (0, -t.shape[1] % GROUP)) for t in (x, weight))
    rows, columns = (t.view(len(t), -1, GROUP) for t in (rows, columns))
    step = (columns.amax(-1) - columns.amin(-1)) / 15
    moved = GROUP**0.5 * (step / 2 + 2**-9 * columns.abs().amax(-1))  # and scales are fp16
    inputs = GROUP**0.5 * finest * rows.abs().amax(-1)
    return rows.norm(dim=-1) @ moved.t() + inputs @ (columns.norm(dim=-1) + moved).t()


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 130),
    inputs=st.integers(1, 200),
    bias=st.booleans(),
    seed=st.integers(0, 100),
)
def test_any_shape(
    kernels: str, kind: LinearKind, rows: int, outputs: int, inputs: int, bias: bool, seed: int
) -> None:
    """Tails of rows, columns and inputs that fill no tile, block or step."""
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    offset = torch.randn(outputs) * inputs**0.5 if bias else None
    actual = PackedLinear(weight, offset, kind)(x)
    expected = functional.linear(x, weight, offset)
    result = 2**-8 if (kind, kernels) == ("bf16", "torch") else 1e-6  # torch rounds results too
    assert ((actual - expected).abs() <= _bound(x, weight, kind) + result * expected.abs()).all()


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_many_rows(kernels: str, kind: LinearKind) -> None:
    """Prefill: several chunks of rows against every block of columns."""
    torch.manual_seed(0)
    x, weight = torch.randn(700, 576), torch.randn(200, 576)
    assert _error(PackedLinear(weight, None, kind)(x), x @ weight.t()) < TOLERANCE[kind]


@pytest.mark.parametrize("kernels", NATIVE_TIERS, indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_row_does_not_depend_on_its_neighbours(kernels: str, kind: LinearKind) -> None:
    """Batch invariance, bit by bit, for every height of tile."""
    torch.manual_seed(0)
    linear = PackedLinear(torch.randn(70, 96), torch.randn(70), kind)
    x = torch.randn(33, 96)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in range(1, 34):
        assert torch.equal(linear(x[:rows]), alone[:rows])


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(kernels: str, kind: LinearKind) -> None:
    """A step of which no logits are wanted: it must not take the worker down."""
    assert PackedLinear(torch.randn(40, 96), None, kind)(torch.empty(0, 96)).shape == (0, 40)


@pytest.mark.parametrize("kernels", NATIVE_TIERS, indirect=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inputs", "bias"), [(1536, False), (1300, True), (1024, False)])
def test_long_rows(kernels: str, kind: LinearKind, inputs: int, bias: bool) -> None:
    """Inputs in slices, the last one shorter, and rows that lie further apart."""
    torch.manual_seed(0)
    weight, x = torch.randn(70, inputs), torch.randn(100, inputs)
    offset = torch.randn(70) if bias else None
    linear = PackedLinear(weight, offset, kind)
    expected = functional.linear(x, weight, offset)
    together = linear(x)
    assert _error(together, expected) < TOLERANCE[kind]
    alone = torch.cat([linear(row[None]) for row in x[::17]])
    assert torch.equal(together[::17], alone)


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nan_stays_in_its_row(kernels: str, kind: LinearKind, poison: float) -> None:
    """One request's NaN or infinity must reach its own row's result and no other's."""
    torch.manual_seed(0)
    linear = PackedLinear(torch.randn(40, 64), None, kind)
    x = torch.randn(5, 64)
    clean = linear(x)
    x[2, 17] = poison
    dirty = linear(x)
    assert not dirty[2].isfinite().any()
    for row in (0, 1, 3, 4):
        assert torch.equal(dirty[row], clean[row])


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("kind", GROUPED)
def test_an_outlier_costs_only_its_group(kernels: str, kind: LinearKind) -> None:
    """One large channel, in inputs or weights, must not round all the others to nothing."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 100), torch.randn(40, 100)
    for outlier in (x, weight):
        outlier[:, 70] *= 1e4
        actual, expected = PackedLinear(weight, None, kind)(x), x @ weight.t()
        known = x[:, 64:96] @ weight[:, 64:96].t()
        rounded = PackedLinear(weight[:, 64:96].contiguous(), None, kind)(x[:, 64:96].contiguous())
        assert _error(actual - rounded, expected - known) < max(8e-3, TOLERANCE[kind]) * 2
        outlier[:, 70] /= 1e4


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("kind", ["int8a16", "int4a16"])
def test_sixteen_bits_of_input_are_nearly_exact(kernels: str, kind: LinearKind) -> None:
    """Both planes count: weights of whole numbers leave the inputs' rounding alone."""
    torch.manual_seed(0)
    low, high = (-127, 127) if kind == "int8a16" else (0, 15)
    weight = torch.randint(low, high + 1, (40, 96)).float()
    weight[:, ::32], weight[:, 1::32] = high, low  # so that every scale is 1
    x = torch.randn(9, 96) * torch.tensor([1e-20, 1.0, 1e20]).repeat(3)[:, None]
    actual = PackedLinear(weight, None, kind)(x)
    assert (
        _error(
            actual / x.abs().amax(1, keepdim=True), (x / x.abs().amax(1, keepdim=True)) @ weight.t()
        )
        < 5e-5
    )


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1e3, 1e6])
def test_scales_of_small_and_large_weights(kernels: str, size: float) -> None:
    """Scales are fp16: where that is coarse, the largest weight must not be cut off."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64), torch.randn(40, 64) * size
    assert _error(PackedLinear(weight, None, "int8")(x), x @ weight.t()) < 2e-2


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
def test_int8_is_exact_up_to_its_scales(kernels: str) -> None:
    """Saturating or overflowing byte products at full range, with every sign."""
    weight = torch.tensor([[127.0, -127.0], [-127.0, -127.0], [127.0, 127.0]]).repeat(1, 500)
    x = torch.tensor([[127.0, 127.0], [127.0, -127.0], [-127.0, -127.0]]).repeat(1, 500)
    assert torch.allclose(PackedLinear(weight, None, "int8")(x), x @ weight.t(), rtol=1e-6)


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("lowest", [0, 1])
@pytest.mark.parametrize("symmetric", [False, True])
def test_int4_finds_the_grid_that_weights_are_on(
    kernels: str, lowest: int, symmetric: bool
) -> None:
    """Q4_1 and Q4_0 of GGUF: rounded to another grid, a model loses quality its file has.

    ``lowest`` 1: no weight is at the lower end of its group's grid, as Q4_0 leaves it.
    """
    torch.manual_seed(0)
    q = torch.randint(lowest, 16, (40, 4, GROUP)).float()
    q[..., 3], q[..., 5] = 15, lowest
    scale = (torch.rand(40, 4, 1) * 0.02 + 1e-3).half().float()
    least = -8 * scale if symmetric else -(torch.rand(40, 4, 1) * 0.2).half().float()
    weight = (scale * q + least).view(40, -1)
    for read, allowed in ((weight, 5e-4), (weight.bfloat16().float(), 2e-3)):
        found = PackedLinear(read, None, "int4a16")(torch.eye(4 * GROUP)).t()
        assert _error(found, weight) < allowed


@pytest.mark.parametrize("size", [3e-8, 1e-7, 5e4, 1e5])
def test_int4_at_the_ends_of_fp16(size: float) -> None:
    """Guards weights made larger than they are where fp16 has no scale so small, and a kernel and
    a fallback that differ, or lose a group, where it has none so large."""
    torch.manual_seed(0)
    weight = torch.randn(40, 4 * GROUP) * size
    found = PackedLinear(weight, None, "int4a16")(torch.eye(4 * GROUP)).t()
    rounded = on_grid(weight)
    assert _error(found, weight) < 1.01
    assert _error(rounded, weight) < 1.01
    assert (found - rounded).norm() < 0.1 * weight.norm()


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("kind", GROUPED)
def test_constant_and_zero_weights(kernels: str, kind: LinearKind) -> None:
    """A group without any spread has no step to divide by."""
    weight = torch.zeros(3, 64)
    weight[1] = 0.375
    x = torch.randn(5, 64)
    found = PackedLinear(weight, None, kind)(x)
    # Inputs of 8 bits are off by half a step each, at most; the weights are exact.
    most = 64 * 0.375 * float(x.abs().max()) / 127 / 2
    assert torch.allclose(found, x @ weight.t(), atol=1.01 * most)
    assert not found[:, [0, 2]].any()


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
def test_zero_and_tiny_rows(kernels: str) -> None:
    """A row of zeros has no scale to divide by; one of subnormal numbers has no inverse."""
    linear = PackedLinear(torch.randn(8, 16), None, "int8")
    x = torch.zeros(3, 16)
    x[1] = 1e-42
    assert torch.equal(linear(x)[0], torch.zeros(8))
    assert linear(x).isfinite().all()


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 15, 16, 33, 576])
def test_norm_and_gate(kernels: str, dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    x, y, weight = (
        torch.randn(7, width).to(dtype),
        torch.randn(7, width).to(dtype),
        torch.rand(width),
    )
    relative, absolute = (2e-5, 2e-6) if dtype == torch.float32 else (1e-2, 1e-3)
    expected = functional.rms_norm(x.float(), (width,), weight, 1e-5)
    normed = rms_norm(x, weight, 1e-5).float()
    assert torch.allclose(normed, expected, rtol=relative, atol=absolute)
    gated = functional.silu(x.float()) * y.float()
    assert torch.allclose(silu_mul(x, y).float(), gated, rtol=relative, atol=absolute)


@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
def test_gate_far_from_zero(kernels: str) -> None:
    """exp must neither overflow into NaN nor leave garbage where it underflows."""
    x = torch.tensor([[-1e30, -1000.0, -104.0, -88.0, 0.0, 88.0, 1000.0, 1e30]]).repeat(3, 3)
    one = torch.ones_like(x)
    assert torch.allclose(silu_mul(x, one), functional.silu(x), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("kernels", ["generic", "torch"], indirect=True)
def test_rotary_table(kernels: str) -> None:
    """Positions late in a long context must not lose their angle."""
    positions = torch.tensor([0, 1, 131_071, 7])
    frequencies = 1e6 ** -torch.linspace(0, 1, 20)
    cos, sin = rotary_table(positions, frequencies, 1.5)
    angle = positions[:, None].float() * frequencies
    assert torch.allclose(cos, angle.cos() * 1.5, atol=1e-5)
    assert torch.allclose(sin, angle.sin() * 1.5, atol=1e-5)
