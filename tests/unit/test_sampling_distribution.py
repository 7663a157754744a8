"""Filters and inverse CDF against a plain reference that sorts whole rows in float64."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.sampling.distribution import Chooser, Filters, weights_of
from tests.unit import sampling_reference as plain

SIZES = (5, 255, 256, 257, 1000, 49_152)


SCALES = st.sampled_from([0.01, 1.0, 4.0])


def row_of(seed: int, size: int, scale: float = 3.0) -> Any:
    return np.random.default_rng(seed).normal(0, scale, size).astype(np.float32)


def choose(row: Any, u: float, *filters: Any) -> int:
    return Chooser(row.size).choose(row, row.max(), Filters(*filters), u)


def kept(row: Any, temperature: float, min_p: float, top_k: int, top_p: float) -> Any:
    """Return the weights of what the filters leave, 0 elsewhere."""
    filters = Filters(temperature, min_p, top_k, top_p)
    weights = np.zeros_like(row)
    if filters.off:
        return weights_of(row, row.max(), temperature, weights)
    ids, values = Chooser(row.size).kept(row, row.max(), filters)
    weights[ids] = values
    return weights


def reference_weights(row: Any, temperature: float, min_p: float, top_k: int, top_p: float) -> Any:
    """The definition: min-p, top-k with ties, then the smallest head of mass top-p with ties."""
    x = row.astype(np.float64) / temperature
    w = np.exp(x - x.max())
    w[w < min_p] = 0
    if top_k:
        w[w < np.sort(w)[::-1][: min(top_k, w.size)][-1]] = 0
    if top_p < 1:
        best = np.sort(w)[::-1]
        mass = np.cumsum(best)
        w[w < best[np.argmax(mass >= top_p * mass[-1] * (1 - 1e-12))]] = 0
    return w


CASES = [
    (1.0, 0.0, 0, 1.0),
    (0.7, 0.0, 0, 0.9),
    (1.3, 0.0, 50, 1.0),
    (1.0, 0.0, 40, 0.8),
    (1.0, 0.1, 0, 1.0),
    (1.0, 0.05, 20, 0.95),
    (0.3, 0.0, 1, 0.5),
    (5.0, 0.0, 0, 0.99),
    (2.0, 0.0, 10**9, 0.999),
    (1.0, 0.0, 3, 1e-9),
    (1.0, 0.005, 0, 0.9),
    (1.5, 1e-4, 0, 0.8),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("temperature", "min_p", "top_k", "top_p"), CASES)
def test_same_tokens_stay_and_same_token_is_drawn(
    size: int, temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    """The search from the top down must keep exactly what a full sort keeps."""
    for seed in range(3):
        row = row_of(seed, size)
        expected = reference_weights(row, temperature, min_p, top_k, top_p)
        weights = kept(row, temperature, min_p, top_k, top_p)
        differing = np.flatnonzero((weights > 0) != (expected > 0))
        # float32 may move one token over the border of the mass
        assert differing.size <= (1 if top_p < 1 else 0)
        cdf = np.cumsum(expected) / expected.sum()
        for u in np.random.default_rng(seed).random(20):
            token = choose(row, float(u), temperature, min_p, top_k, top_p)
            assert token == plain.pick(weights, float(u))
            low = cdf[token - 1] if token else 0.0
            assert weights[token] > 0
            assert low - 1e-5 <= u <= cdf[token] + 1e-5


def test_ties_stay_together() -> None:
    """bf16 logits tie often; an order among equals would depend on the sort."""
    row = np.array([1, 3, 2, 2, 2, 0], dtype=np.float32)
    for top_k in (2, 3, 4):
        weights = kept(row, 1.0, 0.0, top_k, 1.0)
        assert np.flatnonzero(weights).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("size", SIZES)
def test_ends_of_the_unit_interval(size: int) -> None:
    """A number next to 1 must not run past the last token that has weight."""
    row = row_of(1, size)
    row[-2:] = -np.inf
    off = (1.0, 0.0, 0, 1.0)
    assert choose(row, 0.0, *off) == 0
    assert choose(row, 1.0, *off) == size - 3
    assert choose(row, float(np.nextafter(1.0, 0.0)), *off) == size - 3


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=600),
    u=st.floats(0, 1, exclude_max=True),
    temperature=st.floats(0.01, 100),
    min_p=st.floats(0, 1),
    top_k=st.integers(0, 700),
    top_p=st.floats(0.001, 1),
)
def test_the_token_drawn_is_never_one_that_was_excluded(
    logits: list[float], u: float, temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    """Rounding at a border must not emit a token of weight zero."""
    row = np.array(logits, dtype=np.float32)
    weights = kept(row, temperature, min_p, top_k, top_p)
    assert weights[row.argmax()] == 1
    assert weights[choose(row, u, temperature, min_p, top_k, top_p)] > 0


def test_frequencies_follow_the_distribution() -> None:
    """Chi-square of 50,000 draws over 12 tokens; 11 degrees of freedom, 99.9 % is 31.3."""
    row = row_of(4, 300, 1.0)
    row[12:] = -np.inf
    chooser, filters = Chooser(row.size), Filters(0.9, 0.0, 0, 1.0)
    numbers = np.random.default_rng(8).random(50_000)
    highest = row.max()
    drawn = [chooser.choose(row, highest, filters, float(u)) for u in numbers]
    counts = np.bincount(drawn, minlength=12)
    weights = weights_of(row, highest, 0.9, np.empty_like(row))
    expected = weights[:12].astype(np.float64) / weights.sum() * numbers.size
    assert counts[12:].sum() == 0
    assert ((counts[:12] - expected) ** 2 / expected).sum() < 31.3


ROWS = st.one_of(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=600),
    # bf16 logits of a few values, all over the row
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0, 7.25, -90.0, float("-inf")]), max_size=600).map(
        lambda values: [7.25, *values]
    ),
    st.builds(lambda seed, scale: row_of(seed, 3000, scale).tolist(), st.integers(0), SCALES),
)


@settings(max_examples=300, deadline=None)
@given(
    logits=ROWS,
    u=st.floats(0, 1, exclude_max=True),
    temperature=st.one_of(st.just(1.0), st.floats(0.00001, 100)),
    min_p=st.one_of(st.just(0.0), st.sampled_from([1e-45, 1e-37, 1e-9, 1e-3]), st.floats(0, 1)),
    top_k=st.one_of(st.just(0), st.integers(0, 700)),
    top_p=st.one_of(st.just(1.0), st.floats(0, 1)),
)
def test_short_ways_lead_to_the_token_of_the_plain_one(
    logits: list[float], u: float, temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    """A seed must go on meaning the same text, whatever is done for speed."""
    row = np.array(logits, dtype=np.float32)
    weights = plain.weights_of(row, temperature, np.empty_like(row))
    expected = plain.draw(weights, min_p, top_k, top_p, u)
    assert choose(row, u, temperature, min_p, top_k, top_p) == expected


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 3.0, 9.0])
@pytest.mark.parametrize("filters", CASES)
def test_wide_rows_of_any_shape(scale: float, filters: tuple[float, float, int, float]) -> None:
    """Guards: a level that stops too early on flat rows, where heads are thousands of tokens."""
    row = row_of(3, 49_152, scale)
    weights = plain.weights_of(row, filters[0], np.empty_like(row))
    for u in np.random.default_rng(1).random(10):
        assert choose(row, float(u), *filters) == plain.draw(weights, *filters[1:], float(u))
