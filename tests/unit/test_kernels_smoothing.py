"""Evening out channels for int8 changes neither results nor keys and values."""

import math

import pytest
import torch

from shared.kernels import llama
from shared.kernels.llama import LlamaStack
from tests.unit.kernel_tiers import kernels
from tests.unit.test_kernels_stack import Runner, family_model

__all__ = ["kernels"]

pytestmark = pytest.mark.timeout(400)  # the first use compiles

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


@torch.inference_mode()
@pytest.mark.parametrize("kernels", ["torch"], indirect=True)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_smoothed_model_is_the_same_model(
    kernels: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norm weights, biases, rows and columns of all projections must cancel out exactly."""
    model = family_model(family)
    ids = torch.randint(0, 300, (30,))
    plain = Runner(model, "fp32", torch.float32)
    monkeypatch.setattr(llama, "SMOOTHED_KINDS", {"fp32"})
    smooth = Runner(model, "fp32", torch.float32)
    smooth.tables = plain.tables
    expected, actual = plain([(0, 0, ids)]), smooth([(0, 0, ids)])
    assert not torch.equal(actual, expected)
    assert (actual - expected).norm() / expected.norm() < 1e-5
    blocks = plain.tables[0, : len(ids) // 4].long()
    for ours, theirs in zip(smooth.k + smooth.v, plain.k + plain.v, strict=True):
        assert torch.allclose(ours[blocks], theirs[blocks], rtol=1e-4, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("kernels", ["torch"], indirect=True)
def test_large_channels_do_not_spoil_int8(kernels: str) -> None:
    """A few huge channels of the residual stream are what rounds all others to nothing."""
    model = family_model("llama")
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight[::7] *= 200.0
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            linear.weight[:, ::7] /= 200.0
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
            linear.weight[:, ::7] /= 200.0
    ids = torch.randint(0, 300, (30,))
    expected = model(input_ids=ids[None], use_cache=False).logits[0]
    actual = Runner(model, "int8", torch.float32)([(0, 0, ids)])
    assert (actual - expected).norm() / expected.norm() < 2e-2


@torch.inference_mode()
@pytest.mark.parametrize("kernels", ["torch"], indirect=True)
def test_two_processes_load_the_same_int8_model(kernels: str) -> None:
    """Prefill and decode must agree, so nothing random may come in but by a fixed seed."""
    model = family_model("llama")
    ids = torch.randint(0, 300, (9,))
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        results.append(Runner(model, "int8", torch.float32)([(0, 0, ids)]))
    assert torch.equal(*results)


@torch.inference_mode()
@pytest.mark.parametrize("kernels", ["torch"], indirect=True)
def test_a_damaged_embedding_does_not_spoil_the_measure(kernels: str) -> None:
    """Rows of the embedding that nobody uses may hold anything."""
    model = family_model("llama")
    model.get_input_embeddings().weight[:200] = math.nan
    stack = LlamaStack.of_model(model, "int8")
    assert stack is not None
    assert Runner(model, "int8", torch.float32)([(0, 0, torch.tensor([250]))]).isfinite().all()
