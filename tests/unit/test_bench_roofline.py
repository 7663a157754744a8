"""What a step must read and multiply, and a small run of the measurement on the CPU."""

import io
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from shared.errors import BadConfig
from shared.kernels.gpu.plain import PlainKernels
from tests.unit.device_engine import RecordingDevice
from tools.bench.cli import bench_app
from tools.bench.engine.on_device import bench_on_device, table_of
from tools.bench.engine.roofline import (
    SHAPES,
    ModelShape,
    Roof,
    Work,
    decode_bytes,
    matrix_weights,
    measure,
    measure_roof,
    prefill_operations,
)

TINY = ModelShape(hidden=32, intermediate=48, layers=2, heads=4, kv_heads=2, vocabulary=96)
WORK = Work(batches=(1, 3), context=20, prompts=(33,), steps=2)


def test_weights_are_those_of_the_model() -> None:
    """A projection forgotten or counted twice would move every fraction."""
    with torch.device("meta"):
        config = LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=96,
        )
        model = AutoModelForCausalLM.from_config(config)
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.dim() == 2}
    embedding = matrices.pop("model.embed_tokens.weight")
    assert matrix_weights(TINY) == sum(matrices.values())
    assert embedding == 32 * 96


def test_the_8b_shape_is_one() -> None:
    shape = SHAPES["random-8b"]
    assert 7.4e9 < matrix_weights(shape) < 7.6e9  # and 0.5 in the embedding
    one = msgspec.structs.replace(WORK, context=1)
    kv = decode_bytes(shape, 1, one) - 2 * matrix_weights(shape)
    assert kv == 131072  # bytes of KV per token
    assert prefill_operations(shape, 1) == pytest.approx(2 * matrix_weights(shape), rel=1e-3)


def test_a_run_gives_a_line_for_every_step() -> None:
    roof = Roof(copy=1e9, multiply=1e9)
    lines = measure(RecordingDevice(), PlainKernels(), TINY, WORK, roof)
    assert [line.label for line in lines] == ["decode B=1 at 20", "decode B=3 at 20", "prefill 33"]
    for line in lines:
        seconds = line.milliseconds / 1e3
        done = {
            "decode B=1 at 20": decode_bytes(TINY, 1, WORK),
            "decode B=3 at 20": decode_bytes(TINY, 3, WORK),
            "prefill 33": prefill_operations(TINY, 33),
        }[line.label]
        assert line.fraction == pytest.approx(done / seconds / 1e9)
    out = io.StringIO()
    Console(file=out, width=100).print(table_of("t", roof, lines))
    assert "decode B=3 at 20" in out.getvalue()


def test_fp8_is_held_against_fp8() -> None:
    """Guards a share of bytes that nothing reads: half the body's weights, and rows with scales."""
    work = msgspec.structs.replace(WORK, precision="fp8", kv_dtype="fp8")
    body, head = matrix_weights(TINY) - 32 * 96, 32 * 96
    assert decode_bytes(TINY, 3, work) == body + 2 * head + 2 * 2 * 2 * (8 + 4) * 3 * 20
    lines = measure(RecordingDevice(), PlainKernels(), TINY, work, Roof(copy=1e9, multiply=1e9))
    assert len(lines) == 3


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_roof_is_measured(precision: str) -> None:
    roof = measure_roof(RecordingDevice(), precision, side=64, size=1 << 16)
    assert roof.copy > 0
    assert roof.multiply > 0


@pytest.mark.parametrize(
    ("option", "value"),
    [("--precision", "int8"), ("--kv-dtype", "bf16,int8"), ("--sampling", "mixed")],
)
def test_options_that_a_gpu_does_not_obey_are_refused(option: str, value: str) -> None:
    """They were dropped without a word: figures of bf16 under the name of int8."""
    command = ["engine", "--device", "cuda", "--model", "random-8b", option, value]
    result = CliRunner().invoke(bench_app, command)
    assert isinstance(result.exception, BadConfig)
    assert f"{option} {value}" in result.exception.message


def test_models_with_files_are_not_measured_there(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="--model random-8b or random-1b"):
        bench_on_device("cuda", "smollm2-135m-instruct", WORK, tmp_path / "x", False, Console())
