"""llama.cpp through the C API in llama-cpp-python; a step ends with greedy argmax rows."""

import random
import time
from collections.abc import Callable
from typing import Any

import llama_cpp as api
import numpy as np

_WARM_UP = 3
_BATCH = 2048

Rows = list[tuple[int, int, int, bool]]
"""Of each row: token, position, sequence, and whether its logits are wanted."""


class _Model:
    def __init__(self, options: dict[str, Any]) -> None:
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(
            options["model"].encode(), api.llama_model_default_params()
        )
        wanted = api.llama_context_default_params()
        wanted.n_ctx = options["tokens"]
        wanted.n_seq_max = options["slots"]
        wanted.n_batch = _BATCH
        wanted.n_threads = wanted.n_threads_batch = options["threads"]
        wanted.kv_unified = True
        self._context = api.llama_init_from_model(self._model, wanted)
        if not self._model or not self._context:
            raise RuntimeError("llama.cpp cannot load the model")
        self._batch = api.llama_batch_init(_BATCH, 0, 1)
        self._memory = api.llama_get_memory(self._context)
        vocabulary = api.llama_model_get_vocab(self._model)
        self.vocabulary = int(api.llama_vocab_n_tokens(vocabulary))

    def forget(self, sequence: int, start: int) -> None:
        """Drop the KV of ``sequence`` from a position on."""
        api.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def run(self, rows: Rows) -> list[int]:
        """Run rows through the model and return the best token of each wanted one."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wanted
        problem = api.llama_decode(self._context, batch)
        if problem:
            raise RuntimeError(f"llama_decode says {problem}")
        return [self._best(i) for i, row in enumerate(rows) if row[3]]

    def _best(self, row: int) -> int:
        logits = api.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())


def load(options: dict[str, Any]) -> dict[str, Callable[..., object]]:
    """Load the GGUF file as it is quantised."""
    model = _Model(options)
    fresh = random.Random(time.time_ns())
    filled = [(0, 0)]

    def read(tokens: list[int], sequence: int) -> None:
        model.forget(sequence, 0)
        last = len(tokens) - 1
        rows = [(token, i, sequence, i == last) for i, token in enumerate(tokens)]
        for low in range(0, len(rows), _BATCH):
            model.run(rows[low : low + _BATCH])

    def fill(batch: int, context: int) -> None:
        for sequence in range(options["slots"]):
            model.forget(sequence, 0)
        for sequence in range(batch):
            rng = random.Random(sequence)
            read(rng.choices(range(3, model.vocabulary), k=context), sequence)
        filled[0] = (batch, context)

    def decode(batch: int, context: int, steps: int) -> list[float]:
        if filled[0] != (batch, context):
            fill(batch, context)
        tokens, times = list(range(100, 100 + batch)), []
        for position in range(context, context + _WARM_UP + steps):
            started = time.perf_counter()
            tokens = model.run([(token, position, i, True) for i, token in enumerate(tokens)])
            times.append(time.perf_counter() - started)
        for sequence in range(batch):
            model.forget(sequence, context)
        return times[_WARM_UP:]

    def prefill(tokens: int) -> float:
        filled[0] = (0, 0)
        for sequence in range(options["slots"]):
            model.forget(sequence, 0)
        prompt = fresh.choices(range(3, model.vocabulary), k=tokens)
        started = time.perf_counter()
        read(prompt, 0)
        return time.perf_counter() - started

    return {"decode": decode, "prefill": prefill}
