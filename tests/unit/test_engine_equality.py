"""Packed, chunked, paged computation equals the stock model's, family by family."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.engine import Engine
from tests.unit.engine_models import (
    BLOCK,
    CONFIGS,
    SERVED,
    VOCAB,
    WINDOW,
    Driver,
    greedy,
    load_engine,
    logprobs_of,
    prompt,
    reference,
    save_model,
)

LENGTHS = sorted(
    {WINDOW - 1, WINDOW, WINDOW + 1} | {n * BLOCK + d for n in (1, 3) for d in (-1, 0, 1)}
)
NEW_TOKENS = 12


@pytest.fixture(scope="module", params=SERVED)
def pair(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Engine, Any]:
    directory: Path = tmp_path_factory.mktemp(request.param)
    save_model(directory, CONFIGS[request.param]())
    return load_engine(directory), reference(directory)


@pytest.fixture
def driver(pair: tuple[Engine, Any]) -> Iterator[Driver]:
    driver = Driver(pair[0])
    yield driver
    driver.finish()


def eager_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


def generated(model: Any, prompt_ids: tuple[int, ...]) -> list[int]:
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[int] = output[0, len(prompt_ids) :].tolist()
    return tokens


def test_chunks_beside_decodes_give_the_stock_models_logits(
    pair: tuple[Engine, Any], driver: Driver
) -> None:
    """A wrong slot, mask, window, sink or position shows in some row of some chunk."""
    prompts = {0: prompt(1, 23), 1: prompt(2, 9), 2: prompt(3, 14)}
    for key, ids in prompts.items():
        driver.open(key, ids, greedy(logprobs=VOCAB, prompt_logprobs=VOCAB))
    part = driver.part
    driver.step([part(0, 0, 5, sample=False), part(1, 0, 9, sample=True)])
    driver.step([part(1, 9, 10, sample=True), part(0, 5, 13, sample=False)])
    driver.step([part(2, 0, 1, sample=False), part(0, 13, 14, sample=False)])
    driver.step(
        [part(0, 14, 23, sample=True), part(2, 1, 14, sample=True), part(1, 10, 11, sample=True)]
    )
    driver.decode([2, 0, 1], 6)
    assert driver.failed == {}
    for key, ids in prompts.items():
        expected = eager_logprobs(pair[1], driver.tokens[key])
        entries = [*driver.prompt_logprobs[key], *(s.logprob for s in driver.output[key])]
        assert len(entries) == len(driver.tokens[key]) - 1
        assert len(driver.prompt_logprobs[key]) == len(ids) - 1
        for position, entry in enumerate(entries):
            assert entry is not None
            torch.testing.assert_close(logprobs_of(entry), expected[position], atol=2e-5, rtol=0.0)
            assert entry.logprob == pytest.approx(
                expected[position, driver.tokens[key][position + 1]].item(), abs=2e-5
            )


def test_greedy_equals_generate_at_block_and_window_borders(
    pair: tuple[Engine, Any], driver: Driver
) -> None:
    """Off-by-one of a block or window shows at n*B-1, n*B, n*B+1, W-1, W, W+1."""
    expected = {n: generated(pair[1], prompt(7, n)) for n in LENGTHS}
    for n in LENGTHS:
        driver.open(n, prompt(7, n), greedy())
        driver.prefill(n, chunk=5)
    driver.decode(LENGTHS, NEW_TOKENS - 1)
    assert {n: driver.ids(n) for n in LENGTHS} == expected
    for n in LENGTHS:
        driver.close(n)
    for n in (LENGTHS[0], LENGTHS[-1]):
        driver.open(n, prompt(7, n), greedy())
        driver.prefill(n)
        driver.decode([n], NEW_TOKENS - 1)
        assert driver.ids(n) == expected[n], "alone, on blocks used before"


def test_layers_are_announced_in_order_after_their_kv_is_written(
    pair: tuple[Engine, Any], driver: Driver
) -> None:
    """A reader told too early copies stale KV; a layer not told is never copied."""
    engine = pair[0]
    driver.open(0, prompt(4, 6), greedy())
    told: list[int] = []

    def on_layer(layer: int) -> None:
        told.append(layer)
        assert int(driver.arena.k(layer)[..., 0, 0].isfinite().sum()) == 6

    driver.step([driver.part(0, 0, 6, sample=False)], on_layer)
    assert told == list(range(len(engine.layout.layers)))
