"""transformers' continuous batching: its scheduler, paged cache and loop, as ``generate_batch``.

A step is the time between two tokens of one request while all requests of the batch decode.
"""

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

_WARM_UP = 3
_PAGE = 256
_CHUNK = 2048
"""Most prompt tokens in a step."""
_NO_TOKEN = -1
"""As end token: no request ends before its time."""
_PATIENCE = 500.0


def load(options: dict[str, Any]) -> dict[str, Callable[..., object]]:
    """Load the model in bf16; graphs are recorded where transformers records any."""
    torch.set_num_threads(options["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=torch.bfloat16, local_files_only=True
    )
    model = model.to(options["device"]).eval()
    vocabulary, slots = int(model.config.vocab_size), options["slots"]
    chunk = min(_CHUNK, max(options["longest"], slots))
    config = ContinuousBatchingConfig(
        page_size=_PAGE,
        num_blocks=2 * slots * (-(-options["longest"] // _PAGE) + 1),
        max_batch_tokens=chunk,
        max_requests_per_batch=slots,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=0)
    fresh = random.Random(time.time_ns())

    def answers(prompts: list[list[int]], output: int) -> tuple[float, list[list[float]]]:
        """Return when the prompts were handed over, and when each request's tokens came."""
        with model.continuous_batching_context_manager(
            greedy, continuous_batching_config=config, persistent_manager=True
        ) as manager:
            started = time.perf_counter()
            ids = manager.add_requests(prompts, max_new_tokens=output, record_timestamps=True)
            return started, _collect(manager, set(ids))

    def decode(batch: int, context: int, steps: int) -> list[float]:
        room = steps + _WARM_UP + 2 * batch + batch * context // chunk + 2
        prompts = [
            random.Random(number).choices(range(3, vocabulary), k=context)
            for number in range(batch)
        ]
        _, found = answers(prompts, room)
        latest = max(found, key=lambda stamps: stamps[0])
        end = min(stamps[-1] for stamps in found)
        times = [b - a for a, b in itertools.pairwise(latest) if a < end]
        if len(times) < _WARM_UP + steps:
            raise RuntimeError(f"only {len(times)} steps had all {batch} requests")
        return times[_WARM_UP : _WARM_UP + steps]

    def prefill(tokens: int) -> float:
        started, ((stamp,),) = answers([fresh.choices(range(3, vocabulary), k=tokens)], 1)
        return stamp - started

    answers([[3]], 1)
    return {"decode": decode, "prefill": prefill}


def _collect(manager: Any, waiting: set[str]) -> list[list[float]]:  # noqa: ANN401
    """Return the times of every request's tokens, in seconds of ``time.perf_counter``."""
    found, deadline = [], time.monotonic() + _PATIENCE
    while waiting:
        if time.monotonic() > deadline:
            raise RuntimeError(f"no answer in {_PATIENCE:g} s")
        result = manager.get_result(timeout=1.0)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the generation loop ended")
            continue
        if result.error is not None:
            raise RuntimeError(f"a request failed: {result.error}")
        waiting.discard(result.request_id)
        found.append(result.timestamps)
    return found
