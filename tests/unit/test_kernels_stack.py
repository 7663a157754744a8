"""Fused decoder layers against transformers' own models."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from shared.kernels.int4 import on_grid
from shared.kernels.kv_rows import to_rows
from shared.kernels.llama import LlamaStack
from shared.kernels.types import AttentionBatch, LinearKind
from tests.unit.kernel_tiers import EVERY_TIER, NATIVE_TIERS, kernels

__all__ = ["kernels"]

pytestmark = pytest.mark.timeout(400)  # the first use compiles

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "pad_token_id": 0,
}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "int8": 2e-2}
BLOCKS, BLOCK_SIZE = 30, 4


def family_model(family: str) -> Any:
    torch.manual_seed(0)
    config: PreTrainedConfig
    model: Any
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**SIZES, head_dim=16, sliding_window=9))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    else:
        config = Qwen3Config(**SIZES, head_dim=32, use_sliding_window=True, sliding_window=7)
        config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms of 1 and biases of 0 would hide a mix-up
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    return model.eval()


class Runner:
    """A stack with a poisoned pool; runs tokens of sequences that keep their blocks."""

    def __init__(
        self, model: Any, kind: LinearKind, pool: torch.dtype, blocks: int = BLOCKS
    ) -> None:
        stack = LlamaStack.of_model(model, kind)
        assert stack is not None
        self.model, self.stack = model, stack
        shape = (blocks, BLOCK_SIZE, stack.shape.kv_heads, stack.shape.head_dim)
        poison = torch.full(shape, math.nan)
        self.k, self.v = (
            [to_rows(poison, pool).clone() for _ in range(stack.num_layers)] for _ in "kv"
        )
        stack.attach(self.k, self.v)
        self.tables = torch.randperm(blocks).int().view(3, -1)

    def __call__(
        self, parts: list[tuple[int, int, torch.Tensor]], *, whole: bool = True
    ) -> torch.Tensor:
        """Run (sequence, start, ids) parts in one step; logits of every row."""
        counts = [len(ids) for _, _, ids in parts]
        batch = AttentionBatch(
            self.tables[[s for s, _, _ in parts]].contiguous(),
            torch.tensor([0, *counts]).cumsum(0).int(),
            torch.tensor([start + len(ids) for _, start, ids in parts]).int(),
        )
        ids = torch.cat([ids for _, _, ids in parts])
        x = self.model.get_input_embeddings()(ids).float().clone()
        rotary = self.stack.rotary(batch)
        if whole:
            self.stack.run(x, batch, rotary)
        else:
            for layer in range(self.stack.num_layers):
                self.stack.run(x, batch, rotary, range(layer, layer + 1))
        return self.stack.logits(x, torch.arange(len(ids)))[0]


@torch.inference_mode()
@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_logits_equal_the_model(kernels: str, family: str, kind: LinearKind) -> None:
    """Two prompts, one in chunks beside the other's decodes, against one plain forward each."""
    model = family_model(family)
    run = Runner(model, kind, torch.float32)
    a, b = torch.randint(0, 300, (33,)), torch.randint(0, 300, (21,))
    steps = [
        run([(0, 0, a[:17])]),
        run([(0, 17, a[17:31]), (1, 0, b[:20])], whole=False),
        run([(1, 20, b[20:]), (0, 31, a[31:32])]),
        run([(0, 32, a[32:])]),
    ]
    ours_a = torch.cat((steps[0], steps[1][:14], steps[2][1:], steps[3]))
    ours_b = torch.cat((steps[1][14:], steps[2][:1]))
    for ids, ours in ((a, ours_a), (b, ours_b)):
        theirs = model(input_ids=ids[None], use_cache=False).logits[0]
        assert (ours - theirs).norm() / theirs.norm() < TOLERANCE[kind]


@torch.inference_mode()
@pytest.mark.parametrize("kernels", NATIVE_TIERS, indirect=True)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4"])
def test_the_best_tokens_are_those_of_the_logits(kernels: str, kind: LinearKind) -> None:
    """Guards greedy tokens of another row, block or thread, and ties broken by who came first.

    Every token of the vocabulary has a twin with the same weights: the first one counts.
    """
    model = family_model("llama")
    weight = model.lm_head.weight
    half = len(weight) // 2
    weight[half : 2 * half] = weight[:half]
    stack = LlamaStack.of_model(model, kind)
    assert stack is not None
    x = torch.randn(37, stack.shape.hidden)
    x[11, 3], x[30, 0] = math.nan, math.inf
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows, broken in ((torch.arange(37), 2), (torch.tensor([36, 11, 0]), 1)):
                logits, best = stack.logits(x, rows)
                assert best is not None
                finite = logits.isfinite().all(-1)
                assert torch.equal(best, torch.where(finite, logits.argmax(-1), -1))
                assert (best < half).all() and (best == -1).sum() == broken
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_int4_loses_nothing_of_weights_of_4_bits(kernels: str, family: str) -> None:
    """Rounding them anew, or inputs coarsely, would cost what the file kept."""
    model = family_model(family)
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(on_grid(module.weight))
    ids = torch.randint(0, 300, (33,))
    theirs = model(input_ids=ids[None], use_cache=False).logits[0]
    ours = Runner(model, "int4", torch.float32)([(0, 0, ids)])
    assert (ours - theirs).norm() / theirs.norm() < 8e-3  # the head has 8 bits


@torch.inference_mode()
@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_logits_over_int8_kv_equal_the_model(kernels: str, family: str) -> None:
    """A scale of another token or head, or one left out, where the layers write and read KV."""
    model = family_model(family)
    run = Runner(model, "fp32", torch.int8)
    ids = torch.randint(0, 300, (33,))
    ours = torch.cat((run([(0, 0, ids[:30])]), *(run([(0, i, ids[i : i + 1])]) for i in (30, 31))))
    theirs = model(input_ids=ids[None, :32], use_cache=False).logits[0]
    assert (ours - theirs).norm() / theirs.norm() < 0.05


@torch.inference_mode()
@pytest.mark.parametrize("kernels", NATIVE_TIERS, indirect=True)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16, torch.int8])
def test_logits_do_not_depend_on_the_batch(
    kernels: str, kind: LinearKind, pool: torch.dtype
) -> None:
    """Whole layers, bit by bit: a request's tokens must not change with its company."""
    model = family_model("llama")
    ids = [torch.randint(0, 300, (n,)) for n in (20, 1, 9)]
    together = Runner(model, kind, pool)
    company = together([(s, 0, ids[s]) for s in range(3)])
    rows = 0
    for s in range(3):
        alone = Runner(model, kind, pool)([(s, 0, ids[s])])
        assert torch.equal(alone, company[rows : rows + len(ids[s])])
        rows += len(ids[s])


@torch.inference_mode()
@pytest.mark.parametrize("kernels", NATIVE_TIERS, indirect=True)
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_long_steps_do_not_depend_on_the_threads(kernels: str, kind: LinearKind) -> None:
    """Threads with rows of their own must not mix them up, nor compute them otherwise."""
    model = family_model("llama")
    ids = [torch.randint(0, 300, (n,)) for n in (250, 1, 60)]
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):  # alone: 311 rows in one chunk; two: 156 and 155
            torch.set_num_threads(threads)
            torch.manual_seed(1)
            run = Runner(model, kind, torch.bfloat16, blocks=192)
            results.append(run([(s, 0, ids[s]) for s in range(3)]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@torch.inference_mode()
@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_nan_stays_in_its_sequence(kernels: str, kind: LinearKind) -> None:
    """A request whose activations overflow must not take the rest of the batch along."""
    model = family_model("llama")
    ids = [torch.randint(1, 300, (n,)) for n in (5, 1, 9)]
    clean = Runner(model, kind, torch.float32)([(s, 0, ids[s]) for s in range(3)])
    poisoned = Runner(model, kind, torch.float32)
    ids[1][0] = 0
    model.get_input_embeddings().weight[0] = math.nan
    dirty = poisoned([(s, 0, ids[s]) for s in range(3)])
    assert dirty[5].isnan().all()
    assert torch.allclose(dirty[:5], clean[:5], atol=1e-5)
    assert torch.allclose(dirty[6:], clean[6:], atol=1e-5)


def test_other_layers_are_not_taken() -> None:
    """A model with layers we do not know must keep its own forward pass."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.layers = nn.ModuleList([nn.Linear(2, 2)])
            self.config = LlamaConfig(**SIZES)

    assert LlamaStack.of_model(Other(), "int8") is None


@torch.inference_mode()
@pytest.mark.parametrize("kernels", NATIVE_TIERS, indirect=True)
def test_wrong_pools_and_layers_are_refused(kernels: str) -> None:
    """Raw pointers are at work behind these calls: what does not fit must raise."""
    model = family_model("llama")
    stack = LlamaStack.of_model(model, "fp32")
    assert stack is not None
    batch = AttentionBatch(
        torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1]).int(), torch.tensor([1]).int()
    )
    x, rotary = torch.zeros(1, 96), stack.rotary(batch)
    good = [torch.zeros(2, 4, 2, 16) for _ in range(3)]
    with pytest.raises(RuntimeError, match="attach"):
        stack.run(x, batch, rotary)
    with pytest.raises(RuntimeError, match="per layer"):
        stack.attach(good[:2], good[:2])
    with pytest.raises(RuntimeError, match="another shape"):
        stack.attach([torch.zeros(2, 4, 2, 8)] * 3, good)
    stack.attach(good, good)
    with pytest.raises(RuntimeError, match="no layers"):
        stack.run(x, batch, rotary, range(2, 4))
    with pytest.raises(RuntimeError, match="no row"):
        stack.logits(x, torch.tensor([1]))
    with pytest.raises(RuntimeError, match="x must be"):
        stack.run(x.bfloat16(), batch, rotary)
