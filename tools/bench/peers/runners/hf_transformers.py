"""transformers' own forward pass and cache, greedy: what ``generate`` runs, without its checks."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

_WARM_UP = 3


def load(options: dict[str, Any]) -> dict[str, Callable[..., object]]:
    """Load the model in bf16, onto ``device``."""
    torch.set_num_threads(options["threads"])
    torch.set_grad_enabled(False)
    device = torch.device(options["device"])
    model: Any = AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=torch.bfloat16, local_files_only=True
    )
    model = model.to(device).eval()
    vocabulary = int(model.config.vocab_size)
    kept: dict[tuple[int, int], DynamicCache] = {}

    def randint(rows: int, columns: int) -> torch.Tensor:
        return torch.randint(3, vocabulary, (rows, columns), device=device)

    def run(tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        logits = model(
            input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        best = torch.argmax(logits, dim=-1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return best

    def decode(batch: int, context: int, steps: int) -> list[float]:
        if (batch, context) not in kept:
            kept.clear()
            cache = kept[batch, context] = DynamicCache()
            run(randint(batch, context), cache)
        cache = kept[batch, context]
        tokens, times = randint(batch, 1), []
        for _ in range(_WARM_UP + steps):
            started = time.perf_counter()
            tokens = run(tokens, cache)
            times.append(time.perf_counter() - started)
        cache.crop(-len(times))
        return times[_WARM_UP:]

    def prefill(tokens: int) -> float:
        prompt = randint(1, tokens)
        started = time.perf_counter()
        run(prompt, DynamicCache())
        return time.perf_counter() - started

    return {"decode": decode, "prefill": prefill}
