"""Six architectures through a real prefill and a real decode process: split = unsplit."""

import warnings
from pathlib import Path

import pytest
import torch

from shared.ids import WorkerId
from tests.conftest import RunAsync
from tests.transport.worker_rig import BLOCK, Rig, make_config, request, rig
from tests.unit.engine_models import CONFIGS, WINDOW, prompt, reference, save_model

ARCHITECTURES = ("llama", "qwen3", "gemma3", "mistral", "gpt_oss", "mixtral")
OUTPUT = 2 * WINDOW
LENGTHS = (1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, WINDOW - 1, WINDOW, WINDOW + 1, 40)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_output_of_a_split_pair_equals_generate(
    run_async: RunAsync, directory: Path, name: str
) -> None:
    """Guards windows, sinks, norms and experts against a hand-over that forgets what they need.

    Prompts around block, chunk and window borders, all at once, twice: cold and cached.
    """
    model = save_model(directory / "model", CONFIGS[name]())
    stock = reference(model)
    prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    want = [expected(stock, p) for p in prompts]

    async def check() -> None:
        config = make_config(directory, model, split=True)
        config.write_text(config.read_text().replace("max_model_len: 2048", "max_model_len: 96"))
        async with rig(config, "prefill-0", "decode-0") as router:
            for _ in range(2):
                work = [router.split(request(p, OUTPUT)) for p in prompts]
                for (_, second), tokens in zip(work, want, strict=True):
                    assert await router.output(second) == tokens
            if name == "gemma3":
                await only_live_windows_travel(router)
            for worker in ("prefill-0", "decode-0"):
                load = await router.settled(worker)
                assert load.blocks_free + load.blocks_cached == load.blocks_total

    run_async(check(), timeout=110.0)


async def only_live_windows_travel(router: Rig) -> None:
    """Guards bytes that nobody reads: of 40 tokens a window of 7 reaches the last 2 blocks."""
    peer = router.hellos[WorkerId("decode-0")][0]
    await router.settled("decode-0")
    reported = router.reports[peer]
    await router.until(lambda: router.reports[peer] is not reported)
    before, done = (router.counter(peer, name) for name in ("transfer_bytes", "transfers_ok"))
    _, second = router.split(request(prompt(99, 40), 2))
    await router.output(second)
    block = 2 * 2 * 8 * 4 * BLOCK  # K and V of 2 heads of 8 fp32 elements
    travelled = (2 + 40 // BLOCK + 2) * block  # a windowed, a full and a windowed layer
    await router.until(lambda: router.counter(peer, "transfers_ok") == done + 1)
    assert router.counter(peer, "transfer_bytes") - before == travelled


def expected(stock: torch.nn.Module, ids: tuple[int, ...]) -> list[int]:
    """Return the stock model's greedy continuation, end tokens ignored."""
    tensor = torch.tensor([ids])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = stock.generate(  # type: ignore[operator]
            tensor,
            attention_mask=torch.ones_like(tensor),
            max_new_tokens=OUTPUT,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(ids) :]]
