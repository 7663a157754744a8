"""Integer weights, KV in a dtype of its own, and what happens where our layers do not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.fused_runner import FusedRunner
from shared.engine.hf_runner import HfRunner
from shared.engine.quantised import QuantisedLinear
from shared.engine.runner import Logits
from shared.kv.layout import KvDtype
from shared.precision import Precision
from tests.unit.engine_models import (
    CONFIGS,
    SERVED,
    Driver,
    greedy,
    load_engine,
    prompt,
    save_model,
)

FUSED = ("llama", "qwen3", "mistral")


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("family", SERVED)
def test_every_family_is_served_with_integer_weights(
    tmp_path: Path, family: str, precision: Precision
) -> None:
    """int8 for one family only would make the key a lie for all others."""
    engine = load_engine(save_model(tmp_path, CONFIGS[family]()), precision=precision)
    assert engine.layout.dtype == "bf16"
    runner = engine._runner
    assert isinstance(runner, FusedRunner if family in FUSED else HfRunner)
    if isinstance(runner, HfRunner):
        modules = [type(module) for module in runner._model.modules()]
        assert QuantisedLinear in modules


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_int4_says_that_weights_were_not_made_for_it(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards quality lost in silence, in our own layers and in transformers' models."""
    load_engine(save_model(tmp_path, CONFIGS[family]()), precision="int4")
    assert len([r for r in caplog.records if "int4 moves this model's" in r.message]) == 1


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(
    ("precision", "kv_dtype"),
    [
        ("fp32", "bf16"),
        ("bf16", "fp32"),
        ("int8", "fp16"),
        ("int4", "fp32"),
        ("fp32", "int8"),
        ("int8", "int8"),
    ],
)
def test_kv_may_have_another_dtype_than_the_weights(
    tmp_path: Path, family: str, precision: Precision, kv_dtype: KvDtype
) -> None:
    """Prefill and decode of different weights meet in one KV dtype."""
    directory = save_model(tmp_path, CONFIGS[family]())
    driver = Driver(load_engine(directory, precision=precision, kv_dtype=kv_dtype))
    assert (
        driver.arena.k(0).dtype
        == {
            "fp32": torch.float32,
            "bf16": torch.bfloat16,
            "fp16": torch.float16,
            "int8": torch.int8,
        }[kv_dtype]
    )
    driver.open(0, prompt(5, 9), greedy())
    driver.prefill(0, chunk=4)
    driver.decode([0], 6)
    driver.finish()
    assert not driver.failed and len(driver.ids(0)) == 7


def test_int4_of_weights_that_are_on_no_grid_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Quality lost without a word looks like a bad model."""
    load_engine(save_model(tmp_path, CONFIGS["llama"]()), precision="int4")
    assert "int4 moves this model's weights by" in caplog.text


def test_layers_of_ours_that_compute_something_else_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model of a known class with an unknown twist would be served wrongly."""
    logits = FusedRunner.logits

    def twisted(self: Any, step: Any, keep: torch.Tensor, on_layer: Any = None) -> Logits:
        return Logits(logits(self, step, keep, on_layer).values.flip(0))

    monkeypatch.setattr(FusedRunner, "logits", twisted)
    engine = load_engine(save_model(tmp_path, CONFIGS["qwen3"]()), max_model_len=77)
    assert isinstance(engine._runner, HfRunner)
    assert "our fused layers compute something else" in caplog.text
