"""Whole models on a GPU: what transformers generates, with graphs and without."""

from pathlib import Path

import pytest
import torch

from shared.device.cuda import CudaDevice
from shared.device.names import FP8_CAPABILITY
from shared.engine.device.load import DeviceRequest, choose_kernels, prepare_on, start_on
from shared.engine.engine import Engine
from shared.engine.prepared import LoadRequest
from shared.precision import kv_dtype_for
from tests.unit.engine_models import (
    BLOCK,
    CONFIGS,
    SERVED,
    Driver,
    greedy,
    prompt,
    reference,
    save_model,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.keeps("threads", "fds", "memory"),
    pytest.mark.timeout(600),
]

LENGTHS = (5, 2 * BLOCK, 1)
STEPS = 12
NO_GRAPHS = ("gpt_oss", "mixtral", "deepseek_v3")
"""Their experts ask the device how many tokens each gets: nothing a graph can hold."""


def answers(directory: Path) -> list[list[int]]:
    model = reference(directory)
    found = []
    for key, length in enumerate(LENGTHS):
        ids = torch.tensor([prompt(key, length)])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=STEPS + 1,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        found.append(out[0, length:].tolist())
    return found


def driver_on(device: CudaDevice, directory: Path, most: int) -> tuple[Driver, tuple[int, ...]]:
    request = LoadRequest(directory, "fp32", kv_dtype_for("fp32", None), BLOCK, None)
    prepared, runner = prepare_on(device, request, *choose_kernels(device.place))
    driver = Driver(Engine(prepared, directory, 1), num_blocks=96)
    driver.reserve(driver.arena.num_blocks - 1)
    return driver, runner.record(most, prepared.facts.max_model_len) if most else ()


def generated(driver: Driver) -> list[list[int]]:
    for key, length in enumerate(LENGTHS):
        driver.open(key, prompt(key, length), greedy())
        driver.prefill(key, chunk=3)
    driver.decode(range(3), STEPS)
    return [driver.ids(key) for key in range(3)]


@pytest.mark.parametrize("family", SERVED)
def test_generates_what_transformers_generates(
    device: CudaDevice, tmp_path: Path, family: str
) -> None:
    directory = save_model(tmp_path, CONFIGS[family]())
    driver, sizes = driver_on(device, directory, most=4)
    assert family in NO_GRAPHS or sizes == (1, 2, 4)
    assert torch.cuda.current_stream(device.place) == torch.cuda.default_stream(device.place)
    assert generated(driver) == answers(directory)
    driver.finish()


def test_graphs_change_nothing(device: CudaDevice, tmp_path: Path) -> None:
    """The same kernels on the same numbers; a batch of a graph's own size has no filler rows."""
    directory = save_model(tmp_path, CONFIGS["llama"]())
    outputs = []
    for most in (0, 3):
        driver, _ = driver_on(device, directory, most)
        outputs.append(generated(driver))
        driver.finish()
    assert outputs[0] == outputs[1]


def test_layers_are_told_once_each_and_in_order(device: CudaDevice, tmp_path: Path) -> None:
    directory = save_model(tmp_path, CONFIGS["llama"]())
    driver, _ = driver_on(device, directory, most=2)
    told: list[int] = []
    driver.open(0, prompt(0, 40), greedy())
    driver.step([driver.part(0, 0, 40, sample=True)], told.append)
    driver.step([driver.part(0, 40, 41, sample=True)], told.append)
    assert told == [0, 1, 2] * 2
    driver.finish()


def test_fp8_weights_and_kv_pass_their_check_and_step(device: CudaDevice, tmp_path: Path) -> None:
    """The bf16 weights' memory is free again, and graphs hold the products of e4m3."""
    if device.facts().capability < FP8_CAPABILITY:
        pytest.skip("fp8 needs compute capability 8.9")
    directory = save_model(tmp_path, CONFIGS["llama"]())
    request = LoadRequest(directory, "fp8", "fp8", BLOCK, None)
    outputs = []
    for most in (0, 3):
        prepared, runner = prepare_on(device, request, *choose_kernels(device.place))
        driver = Driver(Engine(prepared, directory, 1), num_blocks=96)
        driver.reserve(driver.arena.num_blocks - 1)
        sizes = runner.record(most, prepared.facts.max_model_len) if most else ()
        assert sizes == ((1, 2, 3) if most else ())
        outputs.append(generated(driver))
        driver.finish()
    assert outputs[0] == outputs[1]


def test_a_worker_starts_on_the_device(device: CudaDevice, tmp_path: Path) -> None:
    """Device, model, one allocation of KV and graphs, as a worker takes them."""
    directory = save_model(tmp_path, CONFIGS["llama"]())
    load = LoadRequest(directory, "bf16", "bf16", BLOCK, None)
    before = device.facts().memory_free
    engine, book = start_on("cuda", DeviceRequest(load, 1, 64 << 20, 4, 300))
    assert book.num_blocks == (64 << 20) // engine.layout.block_bytes - 1
    assert before - device.facts().memory_free >= 60 << 20
    engine.detach()
    book.close()
