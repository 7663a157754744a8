"""Steps of random weights on a device beside what its memory and its multipliers can do.

A decode step must read all weights and the KV of its contexts once; a prompt must do its
multiplications. The rates both are held against are measured in the same run.
"""

import statistics
import time
from collections.abc import Callable
from typing import Final, Literal

import numpy as np
import torch
from msgspec import Struct
from transformers import AutoModelForCausalLM, LlamaConfig

from shared.device.device import Device
from shared.engine.attention import ATTENTION_NAME, register
from shared.engine.batch import SequenceInput
from shared.engine.checks import inspect_model
from shared.engine.device.fp8_linear import multiply_rows
from shared.engine.device.kernels import DeviceKernels
from shared.engine.device.load import round_weights
from shared.engine.device.runner import DeviceRunner
from shared.engine.loading import HfModel
from shared.engine.pools import pools
from shared.engine.step import PackedStep
from shared.kernels import fp8
from shared.kv.layout import SCALE_BYTES, KvDtype, KvLayout

BLOCK_SIZE: Final = 16
_TURNS: Final = 5
_COPY_BYTES: Final = 1 << 30
_SIDE: Final = 8192


class ModelShape(Struct, frozen=True, kw_only=True):
    """A Llama of random weights."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int


SHAPES: Final = {
    "random-8b": ModelShape(
        hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, vocabulary=128256
    ),
    "random-1b": ModelShape(
        hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, vocabulary=128256
    ),
}


class Roof(Struct, frozen=True, kw_only=True):
    """``copy``: bytes per second, read plus written; ``multiply``: operations per second, of the
    weights' format.
    """

    copy: float
    multiply: float


class Line(Struct, frozen=True, kw_only=True):
    """One kind of step. ``fraction`` of the roof it is held against, by ``bound``."""

    label: str
    bound: str
    milliseconds: float
    fraction: float


class Work(Struct, frozen=True, kw_only=True):
    """What is measured: decodes of each batch at ``context``, then a prompt of each length."""

    batches: tuple[int, ...]
    context: int
    prompts: tuple[int, ...]
    steps: int
    precision: Literal["bf16", "fp8"] = "bf16"
    kv_dtype: Literal["bf16", "fp8"] = "bf16"


def measure_roof(
    device: Device, precision: str = "bf16", side: int = _SIDE, size: int = _COPY_BYTES
) -> Roof:
    """Measure a large copy, and a large multiplication in the format of ``precision``."""
    place = device.place
    source = torch.zeros(size, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    a = torch.randn(side, side, dtype=torch.bfloat16, device=place)
    copy = _seconds(device, lambda: target.copy_(source))
    if precision == "fp8":
        rows, scales = fp8.quantise_rows(a)
        multiply = _seconds(device, lambda: multiply_rows(rows, scales, rows, scales, None))
    else:
        out = torch.empty_like(a)
        multiply = _seconds(device, lambda: torch.mm(a, a, out=out))
    return Roof(copy=2 * size / copy, multiply=2 * side**3 / multiply)


def random_model(
    device: Device, shape: ModelShape, positions: int, kv_dtype: KvDtype
) -> tuple[HfModel, KvLayout]:
    """Make a bf16 model on the device, without files."""
    register()
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=positions,
    )
    with torch.device(device.place):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        )
        model = model.eval().requires_grad_(False)
        return model, inspect_model(model, kv_dtype, BLOCK_SIZE)


def measure(
    device: Device, kernels: DeviceKernels, shape: ModelShape, work: Work, roof: Roof
) -> list[Line]:
    """Measure every step of ``work``; decode graphs are recorded first."""
    longest = max(work.context + 3 + work.steps, *work.prompts) + BLOCK_SIZE
    per_sequence = -(-longest // BLOCK_SIZE)
    model, layout = random_model(device, shape, longest, work.kv_dtype)
    if work.precision == "fp8":
        round_weights(model, device, kernels)
    runner = DeviceRunner(model, layout, device, kernels, "measured")
    memory, book = device.kv_memory(layout, per_sequence * max(work.batches) + 1)
    layers = range(len(layout.layers))
    runner.attach([memory.k(i) for i in layers], [memory.v(i) for i in layers])
    try:
        runner.record(max(work.batches), longest)
        lines = [_decode(runner, shape, batch, work, roof) for batch in work.batches]
        return lines + [_prefill(runner, shape, tokens, roof) for tokens in work.prompts]
    finally:
        runner.attach(*pools(layout, 0))  # no tensor of the memory outlives it
        memory.close()
        book.close()


def matrix_weights(shape: ModelShape) -> int:
    """Return the weights that every token is multiplied with; the embedding is only looked up."""
    head = shape.hidden // shape.heads
    attention = 2 * shape.hidden * (shape.heads + shape.kv_heads) * head
    return shape.layers * (attention + 3 * shape.hidden * shape.intermediate) + (
        shape.hidden * shape.vocabulary
    )


def decode_bytes(shape: ModelShape, batch: int, work: Work) -> int:
    """Return the bytes that a decode step must read: weights, of which the head is bf16, and KV."""
    outer = shape.hidden * shape.vocabulary
    body = matrix_weights(shape) - outer
    head = shape.hidden // shape.heads
    row = head + SCALE_BYTES if work.kv_dtype == "fp8" else 2 * head
    kv = 2 * shape.layers * shape.kv_heads * row * batch * work.context
    return (body if work.precision == "fp8" else 2 * body) + 2 * outer + kv


def prefill_operations(shape: ModelShape, tokens: int) -> int:
    """Return the multiplications and additions of a prompt; logits of its last token only."""
    body = matrix_weights(shape) - shape.hidden * shape.vocabulary
    attention = 2 * shape.layers * shape.hidden * tokens * (tokens + 1)  # QK and PV, causal
    return 2 * body * tokens + attention + 2 * shape.hidden * shape.vocabulary


def _decode(runner: DeviceRunner, shape: ModelShape, batch: int, work: Work, roof: Roof) -> Line:
    per_sequence = -(-(work.context + 3 + work.steps) // BLOCK_SIZE)
    tables = [tuple(range(i * per_sequence, (i + 1) * per_sequence)) for i in range(batch)]
    keep, times = torch.arange(batch), []
    for position in range(work.context, work.context + 3 + work.steps):
        step = _step([((7,), position, table) for table in tables])
        started = time.perf_counter()
        with torch.inference_mode():
            runner.logits(step, keep)
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times[3:])
    return Line(
        label=f"decode B={batch} at {work.context}",
        bound="copy",
        milliseconds=1e3 * seconds,
        fraction=decode_bytes(shape, batch, work) / seconds / roof.copy,
    )


def _prefill(runner: DeviceRunner, shape: ModelShape, tokens: int, roof: Roof) -> Line:
    table = tuple(range(-(-tokens // BLOCK_SIZE)))
    step = _step([(tuple(i % 1000 for i in range(tokens)), 0, table)])
    times = []
    for _ in range(_TURNS + 1):
        started = time.perf_counter()
        with torch.inference_mode():
            runner.logits(step, torch.tensor([tokens - 1]))
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times[1:])
    return Line(
        label=f"prefill {tokens}",
        bound="multiply",
        milliseconds=1e3 * seconds,
        fraction=prefill_operations(shape, tokens) / seconds / roof.multiply,
    )


def _step(parts: list[tuple[tuple[int, ...], int, tuple[int, ...]]]) -> PackedStep:
    sequences = [
        SequenceInput(i, tokens, start, table, sample=True)
        for i, (tokens, start, table) in enumerate(parts)
    ]
    return PackedStep(sequences, [np.array(table) for _, _, table in parts], BLOCK_SIZE)


def _seconds(device: Device, work: Callable[[], object]) -> float:
    times = []
    for _ in range(_TURNS + 1):
        device.synchronise()
        started = time.perf_counter()
        work()
        device.synchronise()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
