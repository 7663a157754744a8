"""The device runner against transformers' own generation, with and without decode graphs."""

from pathlib import Path

import pytest
import torch

from shared.device.cuda import CudaDevice
from shared.device.cuda_memory import CupyMemory
from shared.device.device import KvMemory, SharedKv
from shared.engine.batch import OpenSequence, SequenceInput, StepInput
from shared.engine.device.load import DeviceRequest, prepare_on, start
from shared.engine.prepared import LoadRequest
from shared.errors import BadConfig, ResourceMissing
from shared.kernels.gpu.plain import PlainKernels
from shared.kv.layout import KvDtype, KvLayout
from shared.precision import Precision
from tests.unit.device_engine import RecordingDevice, device_driver
from tests.unit.engine_models import BLOCK, CONFIGS, greedy, prompt, reference, save_model
from tests.unit.fake_cupy import FakeCupy, FakeRuntime, view

FAMILIES = ("llama", "gemma2", "deepseek_v3", "gemma4")
LENGTHS = (5, 2 * BLOCK, 1)
STEPS = 9


def answers(directory: Path) -> list[list[int]]:
    """Return what transformers generates."""
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


@pytest.mark.parametrize("family", FAMILIES)
def test_generates_what_transformers_generates(tmp_path: Path, family: str) -> None:
    """Chunks, decodes in graphs filled up with rows of nobody, a batch that shrinks."""
    directory = save_model(tmp_path, CONFIGS[family]())
    device = RecordingDevice()
    driver, runner = device_driver(directory, device, PlainKernels(), most=4)
    assert "test kernels" in runner.name
    for key, length in enumerate(LENGTHS):
        driver.open(key, prompt(key, length), greedy())
        driver.prefill(key, chunk=3)
    driver.decode(range(3), STEPS - 2)
    driver.decode(range(2), 2)
    driver.decode([2], 2)
    expected = answers(directory)
    assert [driver.ids(key) for key in range(3)] == expected
    assert sum(graph.replays for graph in device.graphs) >= STEPS + 2
    driver.finish()


def test_graphs_change_nothing(tmp_path: Path) -> None:
    """The same steps, launched eagerly and replayed: equal to the last bit."""
    directory = save_model(tmp_path, CONFIGS["qwen3"]())
    outputs = []
    for most in (0, 4):
        device = RecordingDevice()
        driver, _ = device_driver(directory, device, PlainKernels(), most)
        told: list[int] = []
        for key in range(3):
            driver.open(key, prompt(key, 6), greedy(logprobs=3))
            driver.prefill(key)
        for _ in range(5):
            ends = [len(driver.tokens[key]) for key in range(3)]
            parts = [driver.part(key, ends[key] - 1, ends[key], sample=key != 1) for key in (0, 2)]
            driver.step(parts, told.append)
        assert told == list(range(3)) * 5
        assert bool(device.graphs) is (most > 0)
        outputs.append([driver.output[key] for key in range(3)])
        driver.finish()
    assert outputs[0] == outputs[1]


def test_layers_that_share_kv_share_a_copied_pool_as_well(tmp_path: Path) -> None:
    """A check's pools are copied to the device: once per layer, a sharing layer would see zeros."""
    directory = save_model(tmp_path, CONFIGS["gemma4"]())
    request = LoadRequest(directory, "fp32", "fp32", BLOCK, None)
    device = RecordingDevice()
    _, runner = prepare_on(device, request, PlainKernels(), "test kernels")
    device.place = torch.device("meta")  # anywhere else than the pools are
    pools = [torch.empty(2, BLOCK, 1, 8) for _ in range(2)]
    shared = [pools[0], pools[1], pools[0], pools[1]]
    runner.attach(shared, shared)
    first, second, third, fourth = runner._pools
    assert first.k is third.k
    assert second.v is fourth.v
    assert first.k is not second.k


@pytest.mark.parametrize(
    ("precision", "kv_dtype", "key"),
    [
        ("int8", "bf16", "precision"),
        ("int4", "bf16", "precision"),
        ("bf16", "int8", "kv_dtype"),
    ],
)
def test_integers_are_refused(
    tmp_path: Path, precision: Precision, kv_dtype: KvDtype, key: str
) -> None:
    """Their layers and attention are the CPU's: on a device there is nothing that runs them."""
    directory = save_model(tmp_path, CONFIGS["llama"]())
    request = LoadRequest(directory, precision, kv_dtype, BLOCK, None)
    with pytest.raises(BadConfig, match=f"`{key}: int[48]`.*bf16, fp16 or fp32"):
        prepare_on(RecordingDevice(), request, PlainKernels(), "test kernels")


class FakeGpu(RecordingDevice):
    """Computes on the CPU, with KV where a GPU has it: in one piece of a stand-in for CuPy."""

    def __init__(self) -> None:
        super().__init__()
        self.runtime = FakeRuntime()
        memory = CupyMemory(FakeCupy(self.runtime), 0, view, sliced=False)
        self._cuda = CudaDevice(0, memory, "fake", "unit")

    def kv_memory(self, layout: KvLayout, num_blocks: int) -> tuple[KvMemory, SharedKv]:
        return self._cuda.kv_memory(layout, num_blocks)


def test_a_start_ends_with_an_engine_ready_to_step(tmp_path: Path) -> None:
    """Blocks counted with the scratch block, or a graph that writes to the last one of them."""
    directory = save_model(tmp_path, CONFIGS["llama"]())
    device = FakeGpu()
    load = LoadRequest(directory, "fp32", "fp32", BLOCK, None)
    engine, book = start(device, DeviceRequest(load, 1, 1 << 20, 2, 300), PlainKernels(), "plain")
    blocks = (1 << 20) // engine.layout.block_bytes - 1
    assert book.num_blocks == len(book.generations) == blocks
    assert len(device.graphs) == 2
    tokens = list(prompt(0, LENGTHS[0]))
    opened = (OpenSequence(0, greedy(), tuple(tokens)),)
    table = (blocks - 1, *range(8))
    start_at, found = 0, []
    for _ in range(STEPS + 1):
        part = SequenceInput(0, tuple(tokens[start_at:]), start_at, table, sample=True)
        (sampled,) = engine.step(StepInput(opened, (), (part,))).sampled
        opened, start_at = (), len(tokens)
        tokens.append(sampled.token)
        found.append(sampled.token)
    assert found == answers(directory)[0]
    engine.detach()
    book.close()


def test_kv_memory_of_too_few_blocks_says_how_large_one_is(tmp_path: Path) -> None:
    directory = save_model(tmp_path, CONFIGS["llama"]())
    load = LoadRequest(directory, "fp32", "fp32", BLOCK, None)
    with pytest.raises(ResourceMissing, match=r"than three blocks of 1536 bytes.* need \d{5,}$"):
        start(FakeGpu(), DeviceRequest(load, 1, 4000, 2, 300), PlainKernels(), "plain")


class Small(PlainKernels):
    """Kernels that a long step does not leave room for."""

    def kv_write(self, k: torch.Tensor, *arguments: torch.Tensor) -> None:
        if k.shape[0] > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        super().kv_write(k, *arguments)


def test_a_step_that_will_not_fit_is_found_at_the_start(tmp_path: Path) -> None:
    """Else the first long prompt would end the worker, and the one it is tried on again."""
    directory = save_model(tmp_path, CONFIGS["llama"]())
    load = LoadRequest(directory, "fp32", "fp32", BLOCK, None)
    with pytest.raises(ResourceMissing, match=r"step of 300 tokens does not fit.*max_batch_tokens"):
        start(FakeGpu(), DeviceRequest(load, 1, 1 << 20, 2, 300), Small(), "small")
