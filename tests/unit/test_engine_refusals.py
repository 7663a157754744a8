"""Models that would be served wrongly are refused at load, and the reason is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shared.engine.attention import PagedForward
from shared.engine.checks import inspect_model
from shared.engine.engine import Engine
from shared.engine.loading import load_model
from shared.engine.model_files import resolve_model
from shared.engine.rope import pin_rope
from shared.engine.weights import OUR_GROUP, check_weights
from shared.errors import BadConfig, ResourceMissing, UnsupportedModel
from shared.kernels.types import GROUP
from shared.kv.arena import KvArena
from shared.kv.layout import KvLayout, LayerKv
from tests.unit.engine_models import CONFIGS, POSITIONS, WINDOW, load_engine, save_model

_SMALL: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32}
_HYBRID: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def refusal(directory: Path, config: Any) -> str:
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    with pytest.raises(UnsupportedModel) as refused:
        load_engine(directory, max_model_len=64)
    return refused.value.message


def test_positions_implied_by_a_bias_are_refused(tmp_path: Path) -> None:
    """Bloom adds its positions to the scores and takes none as input."""
    config = transformers.BloomConfig(**_SMALL, n_layer=2, n_head=4, seq_length=64)
    assert "does not take position_ids" in refusal(tmp_path, config)


def test_attention_classes_chosen_by_name_are_refused(tmp_path: Path) -> None:
    """Falcon looks the attention's name up in a table of its own."""
    message = refusal(
        tmp_path,
        transformers.FalconConfig(**_SMALL, num_hidden_layers=2, num_attention_heads=4),
    )
    assert "attention of its own" in message


def test_recurrent_state_is_refused(tmp_path: Path) -> None:
    """Mamba's state would leak between packed sequences."""
    message = refusal(tmp_path, transformers.MambaConfig(**_SMALL, num_hidden_layers=2))
    assert "recurrent state" in message


def test_hybrid_of_state_and_attention_is_refused(tmp_path: Path) -> None:
    """Qwen3-Next computes one layer in four through the interface and is wrong silently."""
    message = refusal(
        tmp_path,
        transformers.Qwen3NextConfig(
            **_HYBRID, layer_types=["linear_attention"] * 3 + ["full_attention"]
        ),
    )
    assert "recurrent state" in message
    assert "linear_attention" in message


def test_unknown_layer_type_is_refused(tmp_path: Path) -> None:
    """Chunked attention is neither full nor sliding."""
    directory = save_model(tmp_path, CONFIGS["gemma3"]())
    model = load_model(directory, "fp32")
    model.config.layer_types = ["chunked_attention", "full_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        inspect_model(model, "fp32", 4)


def loaded(tmp_path: Path, family: str) -> Any:
    return load_model(save_model(tmp_path, CONFIGS[family]()), "fp32")


def test_window_known_to_the_mask_only_is_refused(tmp_path: Path) -> None:
    """Without the argument the layer would attend to everything."""
    model = loaded(tmp_path, "gemma3")
    model.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(UnsupportedModel, match="layer 0 has a sliding window"):
        inspect_model(model, "fp32", 4)


def test_a_layer_that_bypasses_the_interface_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a layer runs, writes no KV and announces nothing."""
    model = loaded(tmp_path, "llama")
    monkeypatch.setattr(
        model.model.layers[1].self_attn, "forward", lambda hidden_states, **_: (hidden_states, None)
    )
    with pytest.raises(UnsupportedModel, match=r"layers \[1\] never called it"):
        inspect_model(model, "fp32", 4)


def test_unknown_attention_argument_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An argument that is not understood may change the result."""
    model = loaded(tmp_path, "llama")
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    monkeypatch.setattr(
        attention,
        "forward",
        lambda *a, **k: forward(*a, **{**k, "position_bias": torch.zeros(1)}),
    )
    with pytest.raises(UnsupportedModel, match="layer 1 passes `position_bias`"):
        inspect_model(model, "fp32", 4)


def test_attention_to_later_tokens_is_refused(tmp_path: Path) -> None:
    """A bidirectional layer cannot be served from a cache."""
    model = loaded(tmp_path, "llama")
    model.model.layers[2].self_attn.is_causal = False
    with pytest.raises(UnsupportedModel, match="layer 2 attends to later tokens"):
        inspect_model(model, "fp32", 4)


def test_packed_result_unlike_the_models_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The net under all other checks: scores that the hook computes differently."""
    directory = save_model(tmp_path, CONFIGS["gemma2"]())
    read = PagedForward.run

    def other_scale(self: Any, layer: int, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        return read(self, layer, query * 3, *rest)

    monkeypatch.setattr(PagedForward, "run", other_scale)
    with pytest.raises(UnsupportedModel, match="differ from the model's own"):
        load_engine(directory)


def test_layout_comes_from_the_tensors(tmp_path: Path) -> None:
    """Latent attention has other head sizes for K and V than its config suggests."""
    layout = load_engine(save_model(tmp_path, CONFIGS["deepseek_v3"]())).layout
    assert layout == KvLayout(
        dtype="fp32", block_size=4, layers=(LayerKv(heads=4, k_dim=12, v_dim=8),) * 3
    )


def test_layout_knows_windows_and_shared_layers(tmp_path: Path) -> None:
    """A shared layer stored twice would double memory and transfer."""
    layers = load_engine(save_model(tmp_path, CONFIGS["gemma4"]())).layout.layers
    assert [layer.window for layer in layers] == [WINDOW, None, WINDOW, None]
    assert [layer.shares for layer in layers] == [None, None, 0, 1]


def test_two_engines_do_not_share_a_config(tmp_path: Path) -> None:
    """The attention's name lives in the config: a shared one would switch both models."""
    directory = save_model(tmp_path, CONFIGS["llama"]())
    first, second = load_model(directory, "fp32"), load_model(directory, "fp32")
    assert first.config is not second.config


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2", "mixtral"])
def test_reduced_precision_passes_the_checks(tmp_path: Path, family: str, precision: str) -> None:
    """Rounding must not be mistaken for a wrong model."""
    engine = load_engine(save_model(tmp_path, CONFIGS[family]()), precision=precision)
    assert engine.layout.dtype == precision


def test_max_model_len_past_the_positions_is_refused(tmp_path: Path) -> None:
    """Beyond its positions a model emits noise."""
    directory = save_model(tmp_path, CONFIGS["llama"]())
    with pytest.raises(BadConfig, match=f"positions end at {POSITIONS}"):
        load_engine(directory, max_model_len=POSITIONS + 1)
    assert load_engine(directory, max_model_len=POSITIONS).max_model_len == POSITIONS
    assert load_engine(directory).max_model_len == POSITIONS


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_frequencies_do_not_depend_on_the_batch(tmp_path: Path, kind: str) -> None:
    """Frequencies picked by the longest sequence of a packed batch would change its neighbours."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
        rope |= {"original_max_position_embeddings": 32}
    config = CONFIGS["llama"]()
    config.rope_parameters = rope
    directory = save_model(tmp_path, config)
    model = load_model(directory, "fp32")
    pin_rope(model, POSITIONS)
    rotary = model.model.rotary_emb
    before = rotary.inv_freq.clone()
    for last in (3, POSITIONS - 1, 5):
        rotary(torch.zeros(1), torch.tensor([[last]]))
        assert torch.equal(rotary.inv_freq, before)


def test_missing_or_truncated_weights_are_refused(tmp_path: Path) -> None:
    """Torch would fail later with a message about shapes, or run on garbage."""
    directory = save_model(tmp_path, CONFIGS["llama"]())
    weights = directory / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    with pytest.raises(ResourceMissing, match="truncated"):
        load_engine(directory)
    weights.write_bytes(content[:5])
    with pytest.raises(ResourceMissing, match="truncated"):
        load_engine(directory)
    weights.unlink()
    with pytest.raises(ResourceMissing, match=r"no model\.safetensors"):
        load_engine(directory)


def test_weights_that_do_not_belong_to_the_config_are_refused(tmp_path: Path) -> None:
    """transformers fills missing weights with random numbers and only prints a table."""
    directory = save_model(tmp_path, CONFIGS["llama"]())
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.self_attn\.q_proj\.weight"):
        load_engine(directory)


@pytest.mark.parametrize(
    ("scheme", "named"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq, 4 bits, groups of 128"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "awq, 4 bits, groups of 64"),
        ({"quant_method": "fp8"}, "(fp8)"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "compressed-tensors"),
        ({"load_in_4bit": True}, "an unnamed method"),
    ],
)
@pytest.mark.parametrize("precision", ["int4", "int8", "bf16"])
def test_weights_of_other_quantisers_are_refused_with_what_is_read(
    tmp_path: Path, scheme: dict[str, Any], named: str, precision: str
) -> None:
    """transformers asks for packages that are not here, or takes integers for weights."""
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": scheme}))
    with pytest.raises(UnsupportedModel) as refused:
        load_engine(tmp_path, precision=precision)
    message = refused.value.message
    for part in (named, tmp_path.name, "`precision: int8`", "groups of 32", "Q4_1"):
        assert part in message
    assert OUR_GROUP == GROUP
    with pytest.raises(UnsupportedModel, match="quantised already"):
        resolve_model(str(tmp_path))


def test_a_quantised_language_model_inside_another_is_refused(tmp_path: Path) -> None:
    config = {"text_config": {"quantization_config": {"quant_method": "awq"}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="awq"):
        load_engine(tmp_path)


def test_weights_that_transformers_unpacks_are_not_refused(tmp_path: Path) -> None:
    """Guards: gpt-oss as it is published."""
    directory = save_model(tmp_path, CONFIGS["llama"]())
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(config))
    assert check_weights(directory) > 0


def test_too_little_memory_is_said_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's answer would be to kill the process."""
    directory = save_model(tmp_path, CONFIGS["llama"]())
    monkeypatch.setattr("shared.engine.weights.available_memory", lambda: 1 << 20)
    with pytest.raises(ResourceMissing, match="GiB of memory"):
        load_engine(directory)


def test_foreign_arena_is_refused(tmp_path: Path) -> None:
    """KV of another shape would be written over the pool's end."""
    engine: Engine = load_engine(save_model(tmp_path, CONFIGS["llama"]()))
    other = KvLayout(dtype="fp32", block_size=8, layers=engine.layout.layers)
    arena = KvArena.create(other, 2)
    try:
        with pytest.raises(ValueError, match="layout"):
            engine.attach(arena)
    finally:
        arena.close()
