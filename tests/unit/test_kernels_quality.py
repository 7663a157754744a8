"""The fused layers' quality on the real model: a sample of what ``diptych bench quality`` reads."""

import math
from functools import cache
from typing import Literal

import numpy as np
import pytest
import torch
from torch.nn import functional

from shared.device.cpu import CpuDevice
from shared.engine.batch import SequenceInput
from shared.engine.device.load import prepare_on
from shared.engine.loading import HfModel, load_model
from shared.engine.model_files import resolve_model
from shared.engine.pools import pools
from shared.engine.prepared import LoadRequest
from shared.engine.step import PackedStep
from shared.errors import ResourceMissing
from shared.kernels.gpu.plain import PlainKernels
from shared.kernels.kv_rows import to_rows
from shared.kernels.llama import LlamaStack
from shared.kernels.types import AttentionBatch, LinearKind
from shared.kv.dtypes import TORCH_DTYPES
from shared.kv.layout import KvDtype
from shared.precision import Precision
from tools.bench.quality.gates import Gate, gate_for
from tools.bench.quality.measure import Plan, read_windows

MODEL = "smollm2-135m-instruct"
PLAN = Plan(model=MODEL, window=256, windows=2, cores=(0,), text=None)
DECODED = 32
"""Tokens at the end of each window that are read one at a time."""
BLOCK_SIZE = 16

pytestmark = pytest.mark.timeout(400)  # the first use compiles


@cache
def loaded(precision: Precision) -> HfModel:
    """Load a model once for all tests; stacks copy its weights."""
    return load_model(resolve_model(MODEL), precision)


class Reading:
    """A stack with the weights of ``kind`` and KV of ``pool`` that reads windows into its pool."""

    def __init__(self, kind: LinearKind, pool: torch.dtype, windows: torch.Tensor) -> None:
        precision: Precision = "fp32" if kind == "fp32" else "bf16"
        self.model = loaded(precision)
        stack = LlamaStack.of_model(self.model, kind)
        assert stack is not None
        self.stack, self.windows = stack, windows
        count, length = windows.shape
        blocks = length // BLOCK_SIZE
        shape = (count * blocks, BLOCK_SIZE, stack.shape.kv_heads, stack.shape.head_dim)
        rows = to_rows(torch.zeros(shape), pool)
        stack.attach(*([rows.clone() for _ in range(stack.num_layers)] for _ in "kv"))
        self.tables = torch.arange(count * blocks).int().view(count, blocks)

    def logprobs(self, low: int, high: int) -> torch.Tensor:
        """Read tokens [low, high) of all windows at once.

        Returns log probabilities [windows, high - low, vocabulary] of what follows each.
        """
        count, tokens = len(self.windows), high - low
        batch = AttentionBatch(
            self.tables,
            (torch.arange(count + 1) * tokens).int(),
            torch.full((count,), high).int(),
        )
        ids = self.windows[:, low:high].flatten()
        x = self.model.get_input_embeddings()(ids).float().clone()
        self.stack.run(x, batch, self.stack.rotary(batch))
        found = functional.log_softmax(self.stack.logits(x, torch.arange(len(x)))[0], -1)
        return found.view(count, tokens, -1)

    def tail(self) -> torch.Tensor:
        """Return the same of the last ``DECODED`` tokens, read one at a time over a prefill."""
        length = self.windows.shape[1]
        self.logprobs(0, length - DECODED)
        steps = [self.logprobs(i, i + 1) for i in range(length - DECODED, length)]
        return torch.cat(steps, dim=1)


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    try:
        return torch.tensor(read_windows(PLAN))
    except ResourceMissing as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def reference(windows: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return Reading("fp32", torch.float32, windows).logprobs(0, windows.shape[1])


def _hold(gate: Gate, ours: torch.Tensor, reference: torch.Tensor, texts: torch.Tensor) -> None:
    """Hold log probabilities [windows, tokens, vocabulary] of what follows ``texts`` to a gate.

    The share of equal best tokens may lie three standard errors of so few positions below its
    bound, the mean KL at twice its bound. No precision may cost more than 2 % of perplexity, but
    fp8, which may on such a text cost twice its bound.
    """
    same = (ours.argmax(-1) == reference.argmax(-1)).float().mean()
    error = math.sqrt(gate.top1 * (1 - gate.top1) / (reference.shape[0] * reference.shape[1]))
    assert same >= gate.top1 - 3 * error
    divergence = (reference.exp() * (reference - ours)).sum(-1).mean()
    assert divergence <= 2 * gate.kl
    after, before = (
        -logprobs[:, :-1].gather(-1, texts[:, 1:, None]).mean() for logprobs in (ours, reference)
    )
    most = 0.02 if gate.perplexity <= 0.02 else 2 * gate.perplexity
    assert math.exp(after - before) <= 1 + most


Kind = Literal["bf16", "int8", "int4"]
KINDS = [("bf16", "bf16"), ("int8", "bf16"), ("int4", "bf16"), ("bf16", "int8"), ("int8", "int8")]


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "kv_dtype"), KINDS)
def test_rounding_costs_no_more_than_its_gate(
    kind: Kind, kv_dtype: KvDtype, windows: torch.Tensor, reference: torch.Tensor
) -> None:
    """int8 once chose another best token at every seventh position.

    The windows are read whole, as prefill does, and their ends a token at a time, as decode does:
    other kernels, and KV in int8 is all that they read of the past.
    """
    gate = gate_for(kind, kv_dtype)
    reading = Reading(kind, TORCH_DTYPES[kv_dtype], windows)
    _hold(gate, reading.logprobs(0, windows.shape[1]), reference, windows)
    _hold(gate, reading.tail(), reference[:, -DECODED:], windows[:, -DECODED:])


@torch.inference_mode()
def test_fp8_costs_no_more_than_its_gate(windows: torch.Tensor, reference: torch.Tensor) -> None:
    """Guards a GPU's rounding, of weights, tokens and KV, emulated: read whole, on the CPU."""
    request = LoadRequest(resolve_model(MODEL), "fp8", "fp8", BLOCK_SIZE, None)
    prepared, runner = prepare_on(CpuDevice(), request, PlainKernels(), "emulated")
    count, length = windows.shape
    blocks = length // BLOCK_SIZE
    runner.attach(*pools(prepared.facts.layout, count * blocks))
    sequences = [
        SequenceInput(i, tuple(window), 0, (), sample=False)
        for i, window in enumerate(windows.tolist())
    ]
    tables = list(np.arange(count * blocks).reshape(count, blocks))
    step = PackedStep(sequences, tables, BLOCK_SIZE)
    logits = runner.logits(step, torch.arange(count * length)).values
    found = functional.log_softmax(logits, -1).view(count, length, -1)
    _hold(gate_for("fp8", "fp8"), found, reference, windows)
