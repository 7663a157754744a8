"""What a step does with its inputs: failures stay with their sequence, nothing is assumed."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shared.engine.batch import OpenSequence, SequenceInput, StepInput
from shared.engine.engine import Engine
from shared.engine.hf_runner import HfRunner
from shared.messages.request import Grammar, Sampling
from tests.unit.engine_models import (
    BLOCK,
    CONFIGS,
    POSITIONS,
    VOCAB,
    Driver,
    greedy,
    load_engine,
    prompt,
    save_model,
)


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Engine:
    directory = tmp_path_factory.mktemp(request.param)
    return load_engine(save_model(directory, CONFIGS[request.param]()))


@pytest.fixture
def driver(engine: Engine) -> Iterator[Driver]:
    driver = Driver(engine)
    yield driver
    driver.finish()


def sampled(seed: int, **options: Any) -> Sampling:
    return Sampling(**{"seed": seed, "max_tokens": 100, "temperature": 1.0, **options})


def test_a_step_without_an_arena_is_an_error(engine: Engine) -> None:
    with pytest.raises(ValueError, match="arena"):
        engine.step(StepInput())


def test_an_empty_step_only_opens_and_closes(driver: Driver) -> None:
    """The scheduler may have nothing to run while it drops sequences."""
    driver.open(0, (5, 6), greedy())
    assert driver.step([]).sampled == ()
    driver.close(0)
    assert driver.step([]) == driver.engine.step(StepInput(closed=(0, 0, 99)))


def test_a_step_that_samples_nothing_needs_no_open_sequence(driver: Driver) -> None:
    """Chunks before the last have no use for a sampler."""
    driver.open(0, prompt(1, 8), greedy())
    driver._opened.clear()
    assert driver.step([driver.part(0, 0, 8, sample=False)]).failed == ()


def test_results_come_in_the_order_of_the_input(driver: Driver) -> None:
    """Packing reorders sequences; the caller must not see it."""
    for key, length in enumerate((1, 9, 1, 4)):
        driver.open(key, prompt(key, length), greedy())
    order = [1, 0, 3, 2]
    result = driver.step([driver.part(k, 0, len(driver.tokens[k]), sample=True) for k in order])
    assert [s.key for s in result.sampled] == order
    together = {k: driver.ids(k) for k in order}
    for key in order:
        driver.close(key)
        driver.open(key, prompt(key, (1, 9, 1, 4)[key]), greedy())
        driver.prefill(key)
        assert driver.ids(key) == together[key]


def test_a_key_may_be_closed_and_opened_again_in_one_step(driver: Driver) -> None:
    """Preemption by recompute reuses the key with the tokens so far."""
    for key in (0, 1):
        driver.open(key, prompt(2, 7), sampled(4, frequency_penalty=0.5))
        driver.prefill(key)
        driver.decode([key], 9)
    assert driver.ids(0) == driver.ids(1)
    expected = driver.ids(0)
    driver.close(0)
    driver.open(0, prompt(2, 7), sampled(4, frequency_penalty=0.5), expected[:4])
    driver.prefill(0, chunk=3)
    driver.decode([0, 1], 5)
    assert driver.ids(0) == expected[4:]


def test_sampled_stream_does_not_depend_on_batch_or_chunks(driver: Driver) -> None:
    """Colocated, split and busy batches must give one client the same text."""
    driver.open(0, prompt(3, 13), sampled(8, top_p=0.9))
    driver.prefill(0)
    driver.decode([0], 10)
    for key in range(1, 6):
        driver.open(key, prompt(key, 5 + key), sampled(key))
        driver.prefill(key)
    driver.open(6, prompt(3, 13), sampled(8, top_p=0.9))
    driver.prefill(6, chunk=4)
    driver.decode([3, 1, 6, 2, 5, 4], 10)
    assert driver.ids(6) == driver.ids(0)


def test_poisoned_kv_fails_its_own_sequence_only(driver: Driver) -> None:
    """NaN times a masked weight of zero is NaN: padding must not reach into other blocks."""
    for key, length in ((0, 9), (1, 14), (2, 6)):
        driver.open(key, prompt(key, length), greedy())
        driver.prefill(key)
    driver.decode([0, 2], 6)
    expected = {key: driver.ids(key) for key in (0, 2)}
    for key, length in ((0, 9), (2, 6)):
        driver.close(key)
        driver.open(key, prompt(key, length), greedy())
        driver.prefill(key)
    driver.arena.k(1)[driver._tables[1][0]] = float("nan")
    driver.decode([0, 1, 2], 1)
    assert set(driver.failed) == {1}
    assert "NaN" in driver.failed[1]
    driver.close(1)
    driver.open(3, prompt(3, 10), greedy())  # takes over the poisoned blocks
    driver.prefill(3, chunk=3)
    driver.decode([0, 2, 3], 5)
    assert {key: driver.ids(key) for key in (0, 2)} == expected
    assert set(driver.failed) == {1}


def test_prompt_logprobs_do_not_depend_on_chunks(driver: Driver) -> None:
    """Entries must neither repeat nor be missing at a chunk's border."""
    ids = prompt(6, 14)
    for key, chunk in ((0, 100), (1, 3), (2, 1)):
        driver.open(key, ids, greedy(prompt_logprobs=2))
        driver.prefill(key, chunk)
        driver.decode([key], 2)
    whole = driver.prompt_logprobs[0]
    assert len(whole) == len(ids) - 1
    for key in (1, 2):
        for a, b in zip(driver.prompt_logprobs[key], whole, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
            assert [t for t, _ in a.top] == [t for t, _ in b.top]


BAD: dict[str, tuple[SequenceInput, str]] = {
    "past the end": (
        SequenceInput(0, (5,), POSITIONS, tuple(range(POSITIONS // BLOCK + 1)), False),
        "max_model_len",
    ),
    "table too short": (SequenceInput(0, (5,) * 9, 0, (1, 2), False), "do not cover"),
    "no table": (SequenceInput(0, (5,), 0, (), False), "do not cover"),
    "foreign block": (SequenceInput(0, (5,), 0, (128,), False), "outside the pool"),
    "negative block": (SequenceInput(0, (5,), 0, (-1,), False), "outside the pool"),
    "unknown token": (SequenceInput(0, (VOCAB,), 0, (1,), False), "outside the vocabulary"),
    "negative token": (SequenceInput(0, (-1,), 0, (1,), False), "outside the vocabulary"),
    "no token": (SequenceInput(0, (), 0, (1,), False), "no tokens"),
    "negative start": (SequenceInput(0, (5,), -1, (1,), False), "negative position"),
    "not open": (SequenceInput(0, (5,), 0, (1,), True), "not open"),
}


@pytest.mark.parametrize("case", BAD)
def test_impossible_input_fails_alone(driver: Driver, case: str) -> None:
    """An index past the end would read or write another sequence's KV, or crash the batch."""
    bad, reason = BAD[case]
    driver.open(7, prompt(1, 5), greedy())
    result = driver.step([bad, driver.part(7, 0, 5, sample=True)])
    assert [(key, error.code) for key, error in result.failed] == [(0, "internal")]
    assert reason in result.failed[0][1].message
    assert [s.key for s in result.sampled] == [7]


def test_the_same_sequence_twice_in_a_step_fails(driver: Driver) -> None:
    """Two parts of one sequence would see each other's KV half written."""
    driver.open(0, prompt(1, 6), greedy())
    parts = [driver.part(0, 0, 3, sample=False), driver.part(0, 3, 6, sample=True)]
    result = driver.step(parts)
    assert "twice" in result.failed[0][1].message
    assert result.sampled == ()


def test_a_sequence_that_cannot_be_opened_fails_before_it_runs(driver: Driver) -> None:
    """A bad bias or a grammar without tokenizer is the client's to know, at once."""
    driver.open(0, prompt(1, 5), greedy(logit_bias={VOCAB: 1.0}))
    driver.open(1, prompt(2, 5), greedy(grammar=Grammar(kind="json_object")))
    driver.open(2, prompt(3, 5), greedy())
    result = driver.step([driver.part(k, 0, 5, sample=True) for k in (0, 1, 2)])
    assert [(key, error.code, error.param) for key, error in result.failed] == [
        (0, "invalid_request", "logit_bias"),
        (1, "invalid_request", "response_format"),
    ]
    assert [s.key for s in result.sampled] == [2]


def test_no_autograd_state_is_kept(driver: Driver) -> None:
    """Gradients would hold every activation of every step."""
    driver.open(0, prompt(1, 5), greedy())
    driver.prefill(0)
    assert torch.is_grad_enabled()
    runner = driver.engine._runner
    own = runner._model.parameters() if isinstance(runner, HfRunner) else [runner._embedding]
    assert not any(p.requires_grad for p in own)
    assert not driver.arena.k(0).requires_grad


def test_a_failing_listener_fails_the_step_and_no_sampler(driver: Driver) -> None:
    """After an exception the same step can be run again."""
    driver.open(0, prompt(1, 5), sampled(3))

    def broken(_: int) -> None:
        raise RuntimeError("peer gone")

    part = driver.part(0, 0, 5, sample=True)
    with pytest.raises(RuntimeError, match="peer gone"):
        driver.engine.step(
            StepInput((OpenSequence(0, sampled(3), prompt(1, 5)),), (), (part,)), broken
        )
    driver._opened.clear()
    assert len(driver.step([part]).sampled) == 1
