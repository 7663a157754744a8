"""The sampler: each row by its own request, independent of neighbours and of where it resumed."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.batch import OpenSequence
from shared.engine.sampling.philox import uniforms
from shared.engine.sampling.sampler import Sampler
from shared.errors import InvalidRequest
from shared.messages.request import Sampling
from tests.unit import sampling_reference as plain

VOCAB = 500


def sampling(**options: Any) -> Sampling:
    return Sampling(**{"seed": 7, "max_tokens": 100, **options})


def logits_of(seed: int, rows: int = 1) -> Any:
    return np.random.default_rng(seed).normal(0, 2, (rows, VOCAB)).astype(np.float32)


def opened(*options: Sampling, outputs: tuple[int, ...] = ()) -> Sampler:
    sampler = Sampler(VOCAB, None)
    for key, option in enumerate(options):
        sampler.open(OpenSequence(key, option, (1, 2, 3), outputs))
    return sampler


def stream(option: Sampling, steps: int, resume_at: int = 0) -> list[int]:
    """Tokens of one sequence whose logits depend on the step only."""
    tokens: list[int] = []
    sampler = opened(option)
    for step in range(steps):
        if step == resume_at:
            sampler = opened(option, outputs=tuple(tokens))
        sampled, failed = sampler.sample([0], logits_of(step))
        assert failed == []
        tokens.append(sampled[0].token)
    return tokens


MANY = [
    sampling(temperature=0.0),
    sampling(seed=1),
    sampling(seed=2, top_p=0.8, top_k=20),
    sampling(seed=3, min_p=0.1, temperature=1.7),
    sampling(seed=4, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.4),
    sampling(seed=5, temperature=0.0, repetition_penalty=1.5, logit_bias={3: 4.0, 9: -100.0}),
    sampling(seed=6, logprobs=3, min_tokens=5, stop_token_ids=(4, 8)),
]


@pytest.mark.parametrize("option", MANY)
@pytest.mark.parametrize("resume_at", [1, 4, 9])
def test_resumed_stream_is_the_same_stream(option: Sampling, resume_at: int) -> None:
    """After a crash a client must see the very tokens it would have seen."""
    assert stream(option, 10, resume_at) == stream(option, 10)


def test_neighbours_do_not_matter() -> None:
    """Batch composition differs between workers and moments."""
    rows = logits_of(3, len(MANY))
    together, _ = opened(*MANY).sample(range(len(MANY)), rows)
    backwards, _ = opened(*MANY).sample(range(len(MANY))[::-1], rows[::-1].copy())
    for key in range(len(MANY)):
        alone, _ = opened(*MANY).sample([key], rows[key : key + 1])
        assert alone[0] == together[key] == backwards[::-1][key]


SAMPLINGS = st.builds(
    sampling,
    seed=st.integers(-5, 2**64),
    temperature=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.01, 20)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
    top_k=st.one_of(st.just(0), st.integers(0, VOCAB + 9)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.1, 10)),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -2.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
    logprobs=st.sampled_from([None, None, 0, 4]),
    min_tokens=st.sampled_from([0, 8]),
    stop_token_ids=st.sampled_from([(), (4, 8)]),
)


def plain_token(state: Any, row: Any) -> int:
    """Return the token of one row, the plain way."""
    edited = state.edited(row, np.empty_like(row))
    if state.greedy:
        return int(edited.argmax())
    option = state.sampling
    weights = plain.weights_of(edited, option.temperature, np.empty_like(row))
    (number,) = uniforms([option.seed], [state.index])
    return plain.draw(weights, option.min_p, option.top_k, option.top_p, float(number))


@settings(max_examples=100, deadline=None)
@given(options=st.lists(SAMPLINGS, min_size=2, max_size=9), seed=st.integers(0, 9))
def test_mixed_rows_get_what_each_gets_alone(options: list[Sampling], seed: int) -> None:
    """Guards: memory shared by rows of a batch carries one's weights or edits into another's."""
    rows = logits_of(seed, len(options))
    given_rows = rows.copy()
    together, failed = opened(*options, outputs=(3, 9)).sample(range(len(options)), rows)
    assert failed == []
    assert (rows == given_rows).all(), "the model's logits were changed"
    for key, option in enumerate(options):
        sampler = opened(*options, outputs=(3, 9))
        state = sampler.get(key)
        assert together[key].token == plain_token(state, rows[key]), option
        assert sampler.sample([key], rows[key : key + 1])[0] == [together[key]]


def test_seeds_and_indices_change_the_draw() -> None:
    """Requests with n > 1 get different seeds and must not repeat each other."""
    draws = {tuple(stream(sampling(seed=s), 6)) for s in range(20)}
    assert len(draws) == 20
    sampler = opened(sampling())
    flat = np.zeros((1, VOCAB), dtype=np.float32)
    same_logits = [sampler.sample([0], flat)[0][0].token for _ in range(20)]
    assert len(set(same_logits)) > 10


def test_draw_is_the_inverse_cdf_at_the_streams_number() -> None:
    """Ties the sampler to the documented definition, not merely to itself."""
    option = sampling(seed=11, temperature=0.8)
    sampler = opened(option, outputs=(5, 6))
    row = logits_of(1)
    token = sampler.sample([0], row)[0][0].token
    p = np.exp((row[0].astype(np.float64) - row.max()) / 0.8)
    cdf = np.cumsum(p / p.sum())
    assert token == int(np.searchsorted(cdf, uniforms([11], [2])[0], side="right"))


def test_greedy_takes_the_best_and_the_lowest_of_equals() -> None:
    """transformers' argmax takes the first of equals."""
    rows = logits_of(5, 3)
    rows[1, [40, 300]] = 99.0
    sampled, _ = opened(*[sampling(temperature=0.0)] * 3).sample([0, 1, 2], rows)
    assert [s.token for s in sampled] == rows.argmax(axis=1).tolist()
    assert sampled[1].token == 40


def test_vanishing_temperature_is_greedy() -> None:
    """1/temperature overflows float32 below 1e-38."""
    row = logits_of(2)
    sampled, failed = opened(sampling(temperature=1e-40)).sample([0], row)
    assert failed == []
    assert sampled[0].token == row.argmax()


@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 1e-3, 100.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_repetition_penalty_leaves_a_token_to_choose(
    penalty: float, temperature: float
) -> None:
    """Tiny ones overflowed float32, and a valid request ended with an internal error."""
    tokens = stream(sampling(repetition_penalty=penalty, temperature=temperature), 8)
    assert len(tokens) == 8


@pytest.mark.parametrize(
    "option",
    [
        sampling(min_p=5.0),
        sampling(min_p=np.nan),
        sampling(top_p=np.nan, top_k=3),
        sampling(temperature=np.inf),
        sampling(repetition_penalty=0.0),
        sampling(logit_bias={3: np.nan}),
    ],
)
def test_numbers_that_no_sampler_can_use_fail_before_any_step(option: Sampling) -> None:
    """They raised in the middle of a step and took the whole batch along."""
    with pytest.raises(InvalidRequest):
        opened(option)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_broken_row_fails_its_own_sequence_only(bad: float) -> None:
    """One poisoned request must not take the batch down."""
    rows = logits_of(5, 3)
    expected, _ = opened(*MANY[:3]).sample([0, 1, 2], rows)
    rows[1, 77] = bad
    sampler = opened(*MANY[:3])
    sampled, failed = sampler.sample([0, 1, 2], rows)
    assert sampled == [expected[0], expected[2]]
    assert [(key, error.code) for key, error in failed] == [(1, "numerical")]
    assert sampler.get(1) is None
    assert len(sampler) == 2


def test_penalties_follow_the_published_formulas() -> None:
    """Repetition over prompt and output (CTRL), frequency and presence over output (OpenAI)."""
    option = sampling(
        temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.3
    )
    prompt, output = (1, 2, 3, 1), (3, 9, 9)
    sampler = Sampler(VOCAB, None)
    sampler.open(OpenSequence(0, option, prompt, output))
    state = sampler.get(0)
    assert state is not None
    row = logits_of(6)[0]
    expected = row.astype(np.float64)
    for token in set(prompt) | set(output):
        value = expected[token]
        expected[token] = value / 1.4 if value > 0 else value * 1.4
        count = output.count(token)
        expected[token] -= 0.7 * count + 0.3 * (count > 0)
    np.testing.assert_allclose(state.edited(row, np.empty_like(row)), expected, rtol=1e-6)
    state.accept(9)
    expected[9] -= 0.7
    np.testing.assert_allclose(state.edited(row, np.empty_like(row)), expected, rtol=1e-6)


def test_penalties_survive_many_distinct_tokens() -> None:
    """The table of seen tokens grows while the sequence runs."""
    option = sampling(presence_penalty=2.0)
    state = opened(option).get(0)
    assert state is not None
    for token in range(300):
        state.accept(token)
    row = np.zeros(VOCAB, dtype=np.float32)
    assert state.edited(row, np.empty_like(row)).tolist() == [-2.0] * 300 + [0.0] * (VOCAB - 300)


def test_bias_forces_and_forbids() -> None:
    """+100 and -100 mean always and never."""
    row = logits_of(8)
    best = int(row.argmax())
    sampled, _ = opened(
        sampling(logit_bias={17: 100.0}), sampling(temperature=0.0, logit_bias={best: -100.0})
    ).sample([0, 1], np.repeat(row, 2, axis=0))
    assert sampled[0].token == 17
    assert sampled[1].token == np.argsort(row[0])[-2]


@pytest.mark.parametrize("param", ["logit_bias", "stop_token_ids"])
def test_tokens_outside_the_vocabulary_are_refused(param: str) -> None:
    """A negative index would touch another token's logit silently."""
    for token in (-1, VOCAB):
        value: Any = {token: 1.0} if param == "logit_bias" else (token,)
        with pytest.raises(InvalidRequest) as refused:
            opened(sampling(**{param: value}))
        assert refused.value.param == param


def test_end_tokens_wait_for_min_tokens() -> None:
    """min_tokens counts output over a resume."""
    option = sampling(
        temperature=0.0, min_tokens=3, stop_token_ids=(4, 8), logit_bias={4: 50.0, 8: 60.0}
    )
    tokens = stream(option, 5, resume_at=2)
    assert not {4, 8} & set(tokens[:3])
    assert tokens[3:] == [8, 8]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    """OpenAI and vLLM report the model's distribution, not the one sampled from."""
    row = logits_of(9)
    row[0, [50, 60]] = row.max() + 1
    x = row[0].astype(np.float64)
    expected = x - x.max() - np.log(np.exp(x - x.max()).sum())
    for k in (0, 1, 4):
        option = sampling(
            temperature=0.3, logprobs=k, frequency_penalty=1.0, logit_bias={5: 30.0}, top_k=2
        )
        sampled, _ = opened(option).sample([0], row)
        logprob = sampled[0].logprob
        assert logprob is not None
        assert logprob.logprob == pytest.approx(expected[sampled[0].token], abs=1e-5)
        order = sorted(range(VOCAB), key=lambda t: (-x[t], t))[:k]
        assert [t for t, _ in logprob.top] == order
        assert [v for _, v in logprob.top] == pytest.approx([expected[t] for t in order], abs=1e-5)
    assert opened(sampling()).sample([0], row)[0][0].logprob is None


def test_tokens_over_many_seeds_follow_the_distribution() -> None:
    """Chi-square of 6,000 requests with seeds 0, 1, …; 7 degrees of freedom, 99.9 % is 24.3."""
    row = np.full((1, VOCAB), -1e4, dtype=np.float32)
    row[0, :8] = [0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 1.5, 0.2]
    n = 6_000
    sampler = opened(*[sampling(seed=s, temperature=1.5) for s in range(n)])
    sampled, _ = sampler.sample(range(n), np.repeat(row, n, axis=0))
    counts = np.bincount([s.token for s in sampled], minlength=VOCAB)
    p = np.exp(row[0, :8].astype(np.float64) / 1.5)
    expected = p / p.sum() * n
    assert counts[8:].sum() == 0
    assert ((counts[:8] - expected) ** 2 / expected).sum() < 24.3
