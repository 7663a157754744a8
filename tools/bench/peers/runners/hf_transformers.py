"""transformers' own forward pass and cache, greedy: what ``generate`` runs, without its checks."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

_WARM_UP = 3


def load(options: dict[str, Any]) -> dict[str, Callable[..., object]]:
    """Load the model in bf16."""
    torch.set_num_threads(options["threads"])
    torch.set_grad_enabled(False)
    model: Any = AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=torch.bfloat16, local_files_only=True
    ).eval()
    vocabulary = int(model.config.vocab_size)
    kept: dict[tuple[int, int], DynamicCache] = {}

    def run(tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        logits = model(
            input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        return torch.argmax(logits, dim=-1)

    def decode(batch: int, context: int, steps: int) -> list[float]:
        if (batch, context) not in kept:
            kept.clear()
            cache = kept[batch, context] = DynamicCache()
            run(torch.randint(3, vocabulary, (batch, context)), cache)
        cache = kept[batch, context]
        tokens, times = torch.randint(3, vocabulary, (batch, 1)), []
        for _ in range(_WARM_UP + steps):
            started = time.perf_counter()
            tokens = run(tokens, cache)
            times.append(time.perf_counter() - started)
        cache.crop(-len(times))
        return times[_WARM_UP:]

    def prefill(tokens: int) -> float:
        prompt = torch.randint(3, vocabulary, (1, tokens))
        started = time.perf_counter()
        run(prompt, DynamicCache())
        return time.perf_counter() - started

    return {"decode": decode, "prefill": prefill}
