"""The engine of Diptych as a measured one; loaded by ``tools/bench/peers/runners/main.py``."""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from shared.device.device import SharedKv
from shared.engine.batch import OpenSequence, SequenceInput, StepInput, StepResult
from shared.engine.engine import Engine
from shared.errors import NumericalError
from shared.kv.arena import KvArena
from shared.kv.layout import DTYPE_BYTES
from shared.messages.request import Sampling
from shared.precision import kv_dtype_for
from tools.bench.engine.figures import CHUNK
from tools.bench.engine.host import HostSide, samplings_of
from tools.bench.engine.kv_bytes import kv_token_bytes

BLOCK_SIZE = 16
BEST = 512
"""Tokens whose log probabilities are compared; all others count as one."""

_WARM_UP = 3
_COPY_BYTES = 256 << 20


class Measured:
    """An engine with an arena of its own; sequence ``i`` has a fixed share of the blocks."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._place = torch.device(options["device"])
        self._arena: SharedKv
        if self._place.type == "cuda":
            self._engine, self._arena = on_device(options)
        else:
            self._engine = emulated(options) if options.get("emulated") else loaded(options)
            arena = KvArena.create(self._engine.layout, blocks_of(options))
            self._engine.attach(arena)
            self._arena = arena
        self._filled = (0, 0)
        self._fresh = random.Random(time.time_ns())

    def facts(self) -> dict[str, object]:
        """Tell about memory: KV dtype, bytes of KV per token and of the whole pool."""
        layout = self._engine.layout
        return {
            "kv_dtype": layout.dtype,
            "kv_token_bytes": layout.block_bytes / layout.block_size,
            "kv_pool_bytes": layout.block_bytes * self._arena.num_blocks,
        }

    def copy_rate(self) -> float:
        """Return bytes per second of a large memory copy, on this engine's threads or device."""
        source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=self._place)
        target = torch.ones_like(source)
        times = []
        for _ in range(5):
            self._synchronise()
            started = time.perf_counter()
            target.copy_(source)
            self._synchronise()
            times.append(time.perf_counter() - started)
        return _COPY_BYTES / sorted(times)[len(times) // 2]

    def decode(self, batch: int, context: int, steps: int, sampling: str = "greedy") -> list[float]:
        """Return the seconds of ``steps`` steps after a few unmeasured ones."""
        keys = range(batch)
        blocks = -(-(context + _WARM_UP + steps + 1) // BLOCK_SIZE)
        tables = [tuple(range(i * blocks, (i + 1) * blocks)) for i in keys]
        if self._filled != (batch, context):
            for key in keys:
                self._read(key, self._prompt(key, context), tables[key])
            self._filled = (batch, context)
        samplings = samplings_of(sampling, batch, steps + _WARM_UP + 1)
        opened = tuple(OpenSequence(key, samplings[key], (1,)) for key in keys)
        tokens, times = list(range(100, 100 + batch)), []
        for position in range(context, context + _WARM_UP + steps):
            started = time.perf_counter()
            parts = tuple(SequenceInput(i, (tokens[i],), position, tables[i], True) for i in keys)
            result = self._step(StepInput(opened, (), parts))
            times.append(time.perf_counter() - started)
            opened, tokens = (), [sampled.token for sampled in result.sampled]
        self._step(StepInput(closed=tuple(keys)))
        return times[_WARM_UP:]

    def host(self, batch: int, context: int, steps: int, sampling: str) -> list[float]:
        """Return the seconds of ``steps`` decode steps that pass outside the model."""
        self._filled = (0, 0)
        side = HostSide(self._engine, self._arena, batch)
        prompts = [tuple(self._prompt(key, context)) for key in range(batch)]
        return side.measure(prompts, samplings_of(sampling, batch, 1 << 20), steps)

    def prefill(self, tokens: int) -> float:
        """Return the seconds from a prompt of ``tokens`` tokens to its first token."""
        self._filled = (0, 0)
        prompt = self._fresh.choices(range(3, self._engine.vocab_size), k=tokens)
        table = tuple(range(-(-tokens // BLOCK_SIZE)))
        opened = (OpenSequence(0, Sampling(seed=0, max_tokens=1, temperature=0.0), (1,)),)
        started = time.perf_counter()
        self._step(StepInput(opened, (), (SequenceInput(0, tuple(prompt), 0, table, True),)))
        seconds = time.perf_counter() - started
        self._step(StepInput(closed=(0,)))
        return seconds

    def score(self, windows: list[list[int]], chunk: int, out: str) -> int:
        """Read equally long windows ``chunk`` tokens at a time, all of them in one batch.

        Writes to ``out`` (safetensors), window by window: ``logprobs`` of the text's own tokens
        [positions], and ``tokens`` and ``best`` [positions, best], the likeliest ones and
        their log probabilities. ``chunk`` 1 runs what decode runs. Returns the positions.
        """
        self._filled = (0, 0)
        length = len(windows[0])
        blocks = -(-length // BLOCK_SIZE)
        sampling = Sampling(seed=0, max_tokens=1, temperature=0.0, prompt_logprobs=BEST)
        opened = tuple(OpenSequence(i, sampling, tuple(w)) for i, w in enumerate(windows))
        entries: list[list[Any]] = [[] for _ in windows]
        for low in range(0, length, chunk):
            parts = tuple(
                SequenceInput(
                    i,
                    tuple(window[low : low + chunk]),
                    low,
                    tuple(range(i * blocks, (i + 1) * blocks)),
                    False,
                )
                for i, window in enumerate(windows)
            )
            result = self._step(StepInput(opened, (), parts))
            opened = ()
            for key, more in result.prompt_logprobs:
                entries[key] += more
        self._step(StepInput(closed=tuple(range(len(windows)))))
        rows = [entry for window in entries for entry in window]
        best = np.array([row.top for row in rows], dtype=np.float64)
        logprobs = np.array([row.logprob for row in rows])
        tokens = best[:, :, 0].astype(np.int64)
        scores = np.ascontiguousarray(best[:, :, 1])
        save_file({"logprobs": logprobs, "tokens": tokens, "best": scores}, out)
        return len(rows)

    def _synchronise(self) -> None:
        if self._place.type == "cuda":
            torch.cuda.synchronize(self._place)

    def _prompt(self, key: int, length: int) -> list[int]:
        return random.Random(key).choices(range(3, self._engine.vocab_size), k=length)

    def _read(self, key: int, prompt: Sequence[int], table: tuple[int, ...]) -> None:
        for low in range(0, len(prompt), CHUNK):
            part = SequenceInput(key, tuple(prompt[low : low + CHUNK]), low, table, False)
            self._step(StepInput(sequences=(part,)))

    def _step(self, step: StepInput) -> StepResult:
        result = self._engine.step(step)
        if result.failed:
            raise NumericalError(result.failed[0][1].message)
        return result


def blocks_of(options: dict[str, Any]) -> int:
    """Return the blocks of the largest shape."""
    return int(-(-options["tokens"] // BLOCK_SIZE) + options["slots"])


def on_device(options: dict[str, Any]) -> tuple[Engine, SharedKv]:
    """Load the engine as a worker on a GPU does, with KV for the largest shape."""
    from shared.engine.device.load import DeviceRequest, start_on
    from shared.engine.prepared import LoadRequest

    model_dir, precision = Path(options["model"]), options["precision"]
    kv_dtype = kv_dtype_for(precision, options["kv_dtype"])
    load = LoadRequest(model_dir, precision, kv_dtype, BLOCK_SIZE, options["longest"])
    # A scratch block comes on top, and fp8 with its scales takes less than two bytes a number.
    element = max(2, DTYPE_BYTES[kv_dtype])
    kv_bytes = (blocks_of(options) + 1) * BLOCK_SIZE * kv_token_bytes(model_dir, element)
    request = DeviceRequest(load, options["threads"], kv_bytes, options["slots"], options["widest"])
    return start_on(options["device"], request)


def loaded(options: dict[str, Any]) -> Engine:
    """Load the engine as a worker on a CPU does."""
    return Engine.load(
        Path(options["model"]),
        precision=options["precision"],
        kv_dtype=options["kv_dtype"],
        block_size=BLOCK_SIZE,
        max_model_len=options["longest"],
        threads=options["threads"],
    )


def emulated(options: dict[str, Any]) -> Engine:
    """Load the engine of a GPU, whose arithmetic plain torch does on the CPU."""
    from shared.device.cpu import CpuDevice
    from shared.engine.device.load import prepare_on
    from shared.engine.prepared import LoadRequest
    from shared.kernels.gpu.plain import PlainKernels

    torch.set_num_threads(options["threads"])
    model_dir, precision = Path(options["model"]), options["precision"]
    kv_dtype = kv_dtype_for(precision, options["kv_dtype"])
    request = LoadRequest(model_dir, precision, kv_dtype, BLOCK_SIZE, options["longest"])
    prepared, _ = prepare_on(CpuDevice(), request, PlainKernels(), "emulated on a CPU")
    return Engine(prepared, model_dir, options["threads"])


def load(options: dict[str, Any]) -> dict[str, Callable[..., object]]:
    """Load the engine with the precision in ``options``."""
    measured = Measured(options)
    return {
        "facts": measured.facts,
        "copy_rate": measured.copy_rate,
        "decode": measured.decode,
        "host": measured.host,
        "prefill": measured.prefill,
        "score": measured.score,
    }
