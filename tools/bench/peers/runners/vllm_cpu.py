"""vLLM for CPUs, engine in this process; a step is vLLM's: schedule, run, sample."""

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

from vllm import LLM, SamplingParams

_WARM_UP = 3
_MARGIN = 256
"""Tokens beyond the longest shape, as far as the model has positions: vLLM asks for room for output
even where there is none."""


def load(options: dict[str, Any]) -> dict[str, Callable[..., object]]:
    """Load the model; prompts seen before stay in the prefix cache, as KV only."""
    room = options["longest"] + _MARGIN
    llm = LLM(
        model=options["model"],
        dtype="bfloat16",
        max_model_len=min(room, options["positions"] or room),
        max_num_seqs=options["slots"],
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    engine = llm.llm_engine
    names = (str(number) for number in itertools.count())
    vocabulary = engine.model_config.get_vocab_size()
    fresh = random.Random(time.time_ns())

    def add(tokens: list[int], output: int) -> str:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False
        )
        return str(engine.add_request(next(names), {"prompt_token_ids": tokens}, sampling))

    def decode(batch: int, context: int, steps: int) -> list[float]:
        room = steps + _WARM_UP + 2 * batch + context // 64
        asked = []
        for number in range(batch):
            rng = random.Random(number)
            asked.append(add(rng.choices(range(3, vocabulary), k=context), room))
        started: set[str] = set()
        while len(started) < batch:
            started.update(o.request_id for o in engine.step() if o.outputs[0].token_ids)
        times = [_timed(engine.step) for _ in range(_WARM_UP + steps)]
        engine.abort_request(asked)
        while engine.has_unfinished_requests():
            engine.step()
        return times[_WARM_UP:]

    def prefill(tokens: int) -> float:
        add(fresh.choices(range(3, vocabulary), k=tokens), 1)
        started = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        return time.perf_counter() - started

    return {"decode": decode, "prefill": prefill}


def _timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
