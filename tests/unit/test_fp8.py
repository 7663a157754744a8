"""fp8 weights and KV: rounding, layers, whole models by plain torch, and who is refused."""

import math
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from shared.device.device import DeviceFacts
from shared.device.names import capability_problem, device_problem
from shared.engine.batch import OpenSequence, SequenceInput, StepInput
from shared.engine.device.fp8_linear import Fp8Linear, round_linears
from shared.engine.device.load import DeviceRequest, prepare_on, start
from shared.engine.engine import Engine
from shared.engine.loading import load_model
from shared.engine.prepared import LoadRequest
from shared.errors import BadConfig, UnsupportedModel
from shared.kernels import fp8
from shared.kernels.gpu.plain import PlainKernels
from shared.kernels.kv_rows import from_rows, to_rows
from shared.kv.layout import KvLayout, LayerKv
from shared.messages.hello import Compatibility
from shared.precision import kv_dtype_for
from tests.unit.device_engine import RecordingDevice
from tests.unit.engine_models import BLOCK, CONFIGS, greedy, prompt, save_model
from tests.unit.test_device_runner import FakeGpu
from tools.bench.engine.diptych import emulated, loaded

FAMILIES = ("llama", "gemma3", "mixtral", "deepseek_v3")


def test_rows_are_rounded_each_by_itself() -> None:
    """Guards one token's outlier that costs its neighbours their precision."""
    x = torch.randn(6, 40) * 10.0 ** torch.arange(-4, 2)[:, None]
    x[1] = 0.0
    rows, scales = fp8.quantise_rows(x)
    back = rows.float() * scales
    assert ((back - x).abs() <= x.abs() / 16 + x.abs().amax(1, keepdim=True) / 448 / 512).all()
    assert (rows.float().abs() <= fp8.LARGEST).all()
    for i in range(6):
        alone, scale = fp8.quantise_rows(x[i : i + 1])
        assert torch.equal(alone.float()[0], rows.float()[i])
        assert torch.equal(scale[0], scales[i])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_spoils_its_own_row_only(bad: float) -> None:
    """Guards an overflow that comes out as a plausible number, or in another request."""
    x = torch.randn(3, 32)
    x[1, 4] = bad
    linear = Fp8Linear(nn.Linear(32, 16, dtype=torch.bfloat16), fp8.quantise_rows)
    out = linear(x.to(torch.bfloat16))
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    assert from_rows(to_rows(x, fp8.FORMAT))[1].isnan().all()


@pytest.mark.parametrize("shape", [(1, 32, 16), (5, 64, 48), (33, 176, 32)])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_layer_is_the_product_of_what_was_rounded(
    shape: tuple[int, int, int], bias: bool
) -> None:
    """Guards scales of the wrong side or order, and a bias that is scaled with the product."""
    rows, inputs, outputs = shape
    plain = nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)
    plain.weight.mul_(10.0 ** torch.linspace(-3, 3, outputs)[:, None])
    x = torch.randn(2, rows, inputs) * 10.0 ** torch.linspace(-2, 2, rows)[:, None]
    x = x.to(torch.bfloat16)
    found = Fp8Linear(plain, fp8.quantise_rows)(x).float()
    ours, theirs = (a.float() * b for a, b in map(fp8.quantise_rows, (x, plain.weight)))
    expected = ours @ theirs.T + (plain.bias.float() if bias else 0.0)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2e-5)


def test_what_cannot_or_should_not_be_rounded_stays_and_is_named() -> None:
    """Guards a product that torch refuses in the middle of a request, and a rounded router."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ModuleDict(
                {
                    "up": nn.Linear(32, 64),
                    "odd": nn.Linear(64, 24),
                    "narrow": nn.Linear(24, 16),
                    "gate": nn.Linear(32, 64),
                }
            )
            self.head = nn.Linear(32, 96)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    model = Model()
    assert round_linears(model, fp8.quantise_rows) == ["layer.odd", "layer.narrow"]
    rounded = [name for name, child in model.named_modules() if isinstance(child, Fp8Linear)]
    assert rounded == ["layer.up"]


@pytest.mark.parametrize("family", FAMILIES)
def test_models_pass_their_check_in_fp8(tmp_path: Path, family: str) -> None:
    """Guards a family whose layers read their own weights, and bounds that rounding misses."""
    directory = save_model(tmp_path, CONFIGS[family]())
    request = LoadRequest(directory, "fp8", "fp8", BLOCK, None)
    prepared, runner = prepare_on(RecordingDevice(), request, PlainKernels(), "plain")
    assert prepared.facts.layout.dtype == "fp8"
    assert "fp8" in runner.name


def test_an_engine_steps_over_fp8_kv_in_a_gpus_memory(tmp_path: Path) -> None:
    """Guards the arena's rows, which are wider than the heads, and what kv_memory counts them."""
    directory = save_model(tmp_path, CONFIGS["llama"]())
    found = []
    for kv_dtype in ("fp8", "bf16"):
        load = LoadRequest(directory, "bf16", kv_dtype, BLOCK, None)
        request = DeviceRequest(load, 1, 1 << 20, 2, 40)
        engine, book = start(FakeGpu(), request, PlainKernels(), "plain")
        assert book.num_blocks == (1 << 20) // engine.layout.block_bytes - 1
        table = (book.num_blocks - 1, *range(8))
        tokens = prompt(0, 21)
        opened = (OpenSequence(0, greedy(logprobs=1), tuple(tokens)),)
        part = SequenceInput(0, tuple(tokens), 0, table, sample=True)
        (sampled,) = engine.step(StepInput(opened, (), (part,))).sampled
        assert sampled.logprob is not None
        found.append(sampled.logprob.logprob)
        engine.detach()
        book.close()
    assert found[0] == pytest.approx(found[1], abs=0.5)


def test_quality_is_measured_with_the_rounding_of_a_gpu(tmp_path: Path) -> None:
    """Guards a table of fp8's loss that is that of the CPU's bf16."""
    options = {
        "model": str(save_model(tmp_path, CONFIGS["llama"]())),
        "precision": "fp8",
        "kv_dtype": "fp8",
        "threads": 1,
        "longest": 48,
    }
    engine = emulated(options)
    assert engine.layout.dtype == "fp8"
    assert "fp8 weights, emulated on a CPU" in engine._runner.name
    with pytest.raises(BadConfig, match="for GPUs"):
        loaded(options)


class Trimmed(RecordingDevice):
    def __init__(self) -> None:
        super().__init__()
        self.trims = 0

    def trim(self) -> None:
        self.trims += 1


def test_the_memory_of_the_weights_before_is_given_back(tmp_path: Path) -> None:
    """Guards KV that has half the room: torch keeps what bf16 weights were loaded into."""
    directory = save_model(tmp_path, CONFIGS["llama"]())
    for precision, trims in (("bf16", 0), ("fp8", 1)):
        device = Trimmed()
        request = LoadRequest(directory, precision, "bf16", BLOCK, None)
        prepare_on(device, request, PlainKernels(), "plain")
        assert device.trims == trims


class ReadsWeights(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(self.inner.weight.dtype))  # type: ignore[no-any-return]


def test_a_model_that_reads_its_weights_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards activations that are brought into e4m3 without a scale, and a bare AttributeError."""
    directory = save_model(tmp_path, CONFIGS["llama"]())

    def loaded(*arguments: object) -> object:
        model = load_model(*arguments)  # type: ignore[arg-type]
        for layer in model.model.layers:
            layer.mlp.down_proj = ReadsWeights(layer.mlp.down_proj)
        return model

    monkeypatch.setattr("shared.engine.device.load.load_model", loaded)
    request = LoadRequest(directory, "fp8", "bf16", BLOCK, None)
    with pytest.raises(UnsupportedModel, match=r"does not run with fp8 layers.*weight.*use bf16"):
        prepare_on(RecordingDevice(), request, PlainKernels(), "plain")


class OldGpu(RecordingDevice):
    def facts(self) -> DeviceFacts:
        return msgspec.structs.replace(super().facts(), kind="cuda", capability=(8, 6))


def test_a_gpu_too_old_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    """Guards an Ampere card on which the first request would find no kernel."""
    directory = save_model(tmp_path, CONFIGS["llama"]())
    for precision, kv_dtype in (("fp8", "bf16"), ("bf16", "fp8")):
        request = LoadRequest(directory, precision, kv_dtype, BLOCK, None)
        with pytest.raises(BadConfig, match=r": fp8` needs.* 8.9 .* has 8\.6: use bf16 or fp16"):
            prepare_on(OldGpu(), request, PlainKernels(), "plain")
    assert capability_problem((8, 9), "fp8", "fp8") is None
    assert capability_problem((12, 0), "fp8", None) is None
    assert capability_problem((8, 0), "bf16", None) is None


def test_a_cpu_is_refused_with_what_it_has(tmp_path: Path) -> None:
    """Guards an emulation that would serve at no speed at all."""
    directory = save_model(tmp_path, CONFIGS["llama"]())
    with pytest.raises(BadConfig, match=r"`precision: fp8` is for GPUs: on a CPU use int8"):
        Engine.load(directory, precision="fp8", block_size=BLOCK, max_model_len=None, threads=1)
    assert device_problem("cpu", "bf16", "fp8") is not None
    assert device_problem("cuda:1", "fp8", "fp8") is None
    assert kv_dtype_for("fp8", None) == "bf16"


def test_heads_whose_scale_would_lie_askew_are_refused() -> None:
    """Guards fp32 scales at addresses that a GPU cannot read at once."""
    with pytest.raises(UnsupportedModel, match=r"`kv_dtype: fp8`.*multiple of 4.*bf16 or fp16"):
        KvLayout(dtype="fp8", block_size=16, layers=(LayerKv(2, 64, 66),))
    layout = KvLayout(dtype="fp8", block_size=16, layers=(LayerKv(2, 64, 128),))
    assert layout.block_bytes == 16 * 2 * (64 + 4 + 128 + 4)


@pytest.mark.parametrize("theirs", ["bf16", "int8"])
def test_fp8_kv_fits_fp8_kv_and_no_other(theirs: str) -> None:
    """Guards a reader that takes e4m3 bytes for something it converts."""
    ours = Compatibility(model="m", kv_dtype="fp8", block_size=16, layout="l")
    assert ours.differences(ours) == []
    other = msgspec.structs.replace(ours, kv_dtype=theirs)
    assert ours.differences(other) == [f"kv_dtype: 'fp8' here, '{theirs}' there"]
    assert other.differences(ours) == [f"kv_dtype: '{theirs}' here, 'fp8' there"]
