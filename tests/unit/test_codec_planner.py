"""When a codec is used: exactly where the published inequality holds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kv.codecs.frame import CodecName
from shared.kv.codecs.planner import CodecFigures, CodecWork, break_even, choose_codec

WORKS: tuple[CodecWork, ...] = ("encode+decode", "decode", "overlapped")
SIZE = 48_000_000


def figures(ratio: float, encode: float, decode: float, codec: CodecName = "int8") -> CodecFigures:
    return CodecFigures(codec=codec, ratio=ratio, encode_rate=encode, decode_rate=decode)


rates = st.floats(1e5, 1e12)
some_figures = st.builds(
    figures,
    st.floats(0.3, 12),
    rates,
    rates,
    st.sampled_from(("int8", "k8v4", "k4v4", "cachegen")),
)


def test_break_even_is_the_published_formula() -> None:
    """B < S (1 - 1/r) / (T_encode + T_decode), worked by hand: 24e6 B saved / 36 ms."""
    by = figures(2.0, 2e9, 4e9)
    assert break_even(by, "encode+decode") == pytest.approx(24e6 / (0.024 + 0.012))
    assert break_even(by, "decode") == pytest.approx(24e6 / 0.012)
    assert break_even(by, "overlapped") == 2e9


@pytest.mark.parametrize("work", WORKS)
def test_used_below_the_break_even_rate_only(work: CodecWork) -> None:
    by = figures(2.0, 2e9, 4e9)
    limit = break_even(by, work)
    below = choose_codec(SIZE, limit * 0.99, [by], work)
    assert below.codec == "int8" and below.saved > 0
    assert "int8 is 2.00 times smaller" in below.reason
    for rate in (limit, limit * 1.01):
        above = choose_codec(SIZE, rate, [by], work)
        assert (above.codec, above.saved, above.seconds) == ("none", 0.0, SIZE / rate)
        assert "int8 pays below" in above.reason


def test_seconds_are_those_of_the_path() -> None:
    by = figures(2.0, 2e9, 4e9)
    assert choose_codec(SIZE, 1e8, [by], "encode+decode").seconds == pytest.approx(
        0.24 + 0.024 + 0.012
    )
    assert choose_codec(SIZE, 1e8, [by], "decode").seconds == pytest.approx(0.24 + 0.012)
    assert choose_codec(SIZE, 1e8, [by], "overlapped").seconds == pytest.approx(0.24)
    assert choose_codec(SIZE, 1.9e9, [by], "overlapped").seconds == pytest.approx(0.024)


def test_strongest_codec_wins_on_a_slow_link_and_the_fastest_on_a_quick_one() -> None:
    int8 = figures(2.0, 2e9, 4e9)
    cachegen = figures(4.0, 6e7, 6e7, "cachegen")
    allowed = [int8, cachegen]
    assert choose_codec(SIZE, 1e6, allowed, "encode+decode").codec == "cachegen"
    assert choose_codec(SIZE, 1e8, allowed, "encode+decode").codec == "int8"
    assert choose_codec(SIZE, 1e10, allowed, "encode+decode").codec == "none"


def test_what_grows_or_nothing_allowed_is_none_with_a_reason() -> None:
    assert choose_codec(SIZE, 1.0, [], "decode").reason == "no other codec is allowed"
    grown = choose_codec(SIZE, 1.0, [figures(0.6, 1e9, 1e9)], "overlapped")
    assert grown.codec == "none" and "int8" in grown.reason


@given(
    allowed=st.lists(some_figures, max_size=4),
    rate=rates,
    size=st.integers(1, 10**12),
    work=st.sampled_from(WORKS),
)
def test_never_slower_than_plain_and_best_of_all(
    allowed: list[CodecFigures], rate: float, size: int, work: CodecWork
) -> None:
    """Whatever the figures, the plan costs at most what `none` and every single one cost."""
    choice = choose_codec(size, rate, allowed, work)
    plain = size / rate
    assert choice.seconds <= plain
    assert choice.saved == pytest.approx(plain - choice.seconds)
    assert (choice.codec == "none") == (choice.saved == 0.0)
    assert choice.reason
    for one in allowed:
        assert choice.seconds <= choose_codec(size, rate, [one], work).seconds
    twice = choose_codec(2 * size, rate, allowed, work)
    assert twice.codec == choice.codec, "the size alone decides nothing"


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_figures_nobody_measured_are_refused(bad: float) -> None:
    """A rate of 0 or NaN would choose at random."""
    good = figures(2.0, 1e9, 1e9)
    with pytest.raises(ValueError, match="link_rate"):
        choose_codec(SIZE, bad, [good], "decode")
    with pytest.raises(ValueError, match="size"):
        choose_codec(0, 1e9, [good], "decode")
    for field in ("ratio", "encode_rate", "decode_rate"):
        values = {"ratio": 2.0, "encode_rate": 1e9, "decode_rate": 1e9, field: bad}
        wrong = CodecFigures(codec="int8", **values)
        with pytest.raises(ValueError, match=f"{field} of int8"):
            choose_codec(SIZE, 1e9, [wrong], "decode")
