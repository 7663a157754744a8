"""The fused layers' quality on the real model: a sample of what ``diptych bench quality`` reads."""

import math

import pytest
import torch
from torch.nn import functional

from shared.engine.loading import HfModel, load_model
from shared.engine.model_files import resolve_model
from shared.errors import ResourceMissing
from shared.kernels.llama import LlamaStack
from shared.kernels.types import AttentionBatch, LinearKind
from shared.precision import Precision
from tools.bench.quality.gates import GATES
from tools.bench.quality.measure import Plan, read_windows

MODEL = "smollm2-135m-instruct"
PLAN = Plan(model=MODEL, window=256, windows=2, cores=(0,), text=None)
BLOCK_SIZE = 16

pytestmark = pytest.mark.timeout(400)  # the first use compiles


def _read(model: HfModel, kind: LinearKind, windows: torch.Tensor) -> torch.Tensor:
    """Return log probabilities [positions, vocabulary] of what follows each token."""
    stack = LlamaStack.of_model(model, kind)
    assert stack is not None
    count, length = windows.shape
    blocks = length // BLOCK_SIZE
    shape = (count * blocks, BLOCK_SIZE, stack.shape.kv_heads, stack.shape.head_dim)
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    k, v = ([torch.zeros(shape, dtype=dtype) for _ in range(stack.num_layers)] for _ in "kv")
    stack.attach(k, v)
    batch = AttentionBatch(
        torch.arange(count * blocks).int().view(count, blocks),
        (torch.arange(count + 1) * length).int(),
        torch.full((count,), length).int(),
    )
    x = model.get_input_embeddings()(windows.flatten()).float().clone()
    stack.run(x, batch, stack.rotary(batch))
    return functional.log_softmax(stack.logits(x, torch.arange(len(x))), -1)


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    try:
        return torch.tensor(read_windows(PLAN))
    except ResourceMissing as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def reference(windows: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return _read(load_model(resolve_model(MODEL), "fp32"), "fp32", windows)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_rounding_costs_no_more_than_its_gate(
    kind: LinearKind, windows: torch.Tensor, reference: torch.Tensor
) -> None:
    """int8 once chose another best token at every seventh position.

    The gate's bound less three standard errors of a share over so few positions; a mean KL over
    them lies within twice its bound.
    """
    precisions: dict[LinearKind, Precision] = {"bf16": "bf16", "int8": "int8", "int4": "int4"}
    gate = GATES[precisions[kind]]
    ours = _read(load_model(resolve_model(MODEL), "bf16"), kind, windows)
    same = (ours.argmax(-1) == reference.argmax(-1)).float().mean()
    divergence = (reference.exp() * (reference - ours)).sum(-1).mean()
    error = math.sqrt(gate.top1 * (1 - gate.top1) / len(reference))
    assert same >= gate.top1 - 3 * error
    assert divergence <= 2 * gate.kl
