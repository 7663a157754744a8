"""Encoded chunks without sockets: what is cut, what is refused, and when a codec pays."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kv.arena import KvArena
from shared.kv.codecs.frame import CodecName
from shared.kv.codecs.planner import CodecFigures
from shared.kv.layout import KvLayout, LayerKv
from shared.messages.bulk import Fetch
from shared.transport.bulk.calibration import measure_figures
from shared.transport.bulk.encoded import EncodedChunks
from shared.transport.bulk.plan import plan_encoded, plan_fetch
from shared.transport.bulk.rates import AUTO_CODECS, PairRates
from shared.transport.bulk.servings import Servings

SHAPE = LayerKv(2, 8, 4)
LAYOUT = KvLayout(
    dtype="bf16",
    block_size=4,
    layers=(SHAPE, LayerKv(1, 4, 4), LayerKv(2, 8, 4, shares=0), SHAPE),
)
INT8 = CodecFigures(codec="int8", ratio=2.0, encode_rate=1e9, decode_rate=1e9)
MEASURED = (
    CodecFigures(codec="int8", ratio=1.94, encode_rate=0.76e9, decode_rate=2.23e9),
    CodecFigures(codec="k8v4", ratio=2.46, encode_rate=0.47e9, decode_rate=1.05e9),
    CodecFigures(codec="k4v4", ratio=3.19, encode_rate=0.43e9, decode_rate=0.94e9),
)
"""The table of docs/codecs.md."""
PEER = b"decode-0#1"
MB = 1 << 20


@given(st.integers(1, 40), st.integers(1, 4096))
def test_a_plan_for_codecs_covers_every_block_of_every_layer_once(
    blocks: int, chunk_bytes: int
) -> None:
    """Guards gaps, overlaps, and K without its V (36, 37)."""
    seen = []
    for chunk in plan_encoded(LAYOUT, range(4), blocks, chunk_bytes):
        k, v = chunk.segments
        assert (k.part, v.part) == (0, 1)
        assert (k.layer, k.first, k.end) == (v.layer, v.first, v.end)
        unit = LAYOUT.layer_block_bytes(k.layer)
        assert chunk.size == (k.end - k.first) * unit <= max(chunk_bytes, unit)
        seen += [(k.layer, position) for position in range(k.first, k.end)]
    assert seen == [(layer, position) for layer in (0, 1, 3) for position in range(blocks)]


def fetch(**changes: object) -> Fetch:
    good: dict[str, object] = {
        "job": 1,
        "attempt": 1,
        "arena": 1,
        "first_layer": 0,
        "end_layer": 4,
        "blocks": (1, 2),
        "generations": (1, 1),
        "chunk_bytes": 64,
        "need": ((0, 1),),
        "credit": 1,
        "codec": "int8",
        "tokens": 7,
    }
    return Fetch(**(good | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"codec": "later"}, "no codec 'later' here"),
        ({"tokens": 0}, "0 tokens in 2 blocks"),
        ({"tokens": 4}, "4 tokens in 2 blocks"),
        ({"tokens": 9}, "9 tokens in 2 blocks"),
        ({"tokens": -1}, "-1 tokens"),
        ({"need": ((0, 99),)}, "no chunks 0..99"),
    ],
)
def test_an_encoded_fetch_that_makes_no_sense_is_refused(
    wrong: dict[str, object], words: str
) -> None:
    """Guards a peer of another version, and reads behind the last token."""
    servings = Servings(LAYOUT, 24, arena=1, codecs=("int8",))
    assert servings.fetch(PEER, fetch(), 0.0) is None
    refusal = servings.fetch(PEER, fetch(**wrong), 0.0)
    assert refusal is not None and refusal.reason == "invalid" and words in refusal.message


def test_both_sides_cut_by_the_codec_of_the_fetch() -> None:
    assert plan_fetch(LAYOUT, fetch()) == plan_encoded(LAYOUT, range(4), 2, 64)
    assert plan_fetch(LAYOUT, fetch(codec="none")) != plan_encoded(LAYOUT, range(4), 2, 64)


def link_of(rates: PairRates, rate: float, now: float) -> None:
    """Let one plain job of 1 MiB travel at this rate."""
    rates.begun("none", now)
    rates.arrived(MB)
    rates.over(now + MB / rate)


def test_auto_encodes_on_a_slow_link_only() -> None:
    """Guards a codec that costs more than it saves: both ends count at half their rate, 5e8."""
    for rate, codec in ((1e8, "int8"), (4.9e8, "int8"), (5.1e8, "none"), (1e10, "none")):
        rates = PairRates((INT8,))
        assert rates.choose(MB) == "none", "nothing is known of the link yet"
        link_of(rates, rate, 1.0)
        assert rates.choose(MB) == codec, rates.reason


@pytest.mark.parametrize(
    ("rate", "codec"),
    [(5e7, "k4v4"), (1.25e8, "int8"), (3.7e8, "int8"), (3.9e8, "none"), (4.9e9, "none")],
    ids=["400 Mbit/s", "1 Gbit/s", "3 Gbit/s", "3.1 Gbit/s", "memory"],
)
def test_auto_counts_what_overlaps_once(rate: float, codec: str) -> None:
    """Guards plain KV on links where `int8` pays: encoder, wire and decoder work side by side.

    In turn, the measured `int8` would pay below 275 MB/s only.
    """
    rates = PairRates(MEASURED)
    link_of(rates, rate, 1.0)
    assert rates.choose(MB) == codec, rates.reason


def test_a_coder_as_fast_as_the_link_is_not_fast_enough() -> None:
    """Guards a codec whose saving is gone once an engine takes half of its core."""
    rates = PairRates((msgspec.structs.replace(INT8, ratio=10.0, encode_rate=1.2e8),))
    link_of(rates, 1e8, 1.0)
    assert rates.choose(MB) == "none"
    assert "pays below 60.0 MB/s only" in rates.reason


def test_an_encoder_is_not_taken_for_the_link() -> None:
    """Guards a codec that is kept because it is what makes the link look slow."""
    rates = PairRates((INT8,))
    link_of(rates, 1e8, 1.0)
    rates.begun("int8", 2.0)
    rates.arrived(MB)
    rates.over(1002.0)
    assert rates.link_rate == pytest.approx(1e8)
    choices = [rates.choose(MB) for _ in range(32)]
    assert choices.count("none") == 2, "the link is measured anew from time to time"
    link_of(rates, 1e12, 2000.0)
    assert rates.choose(MB) == "none", "the link has become fast"


def test_jobs_at_once_are_one_load_on_the_link() -> None:
    """Guards a link that looks slow because jobs share it."""
    rates = PairRates((INT8,))
    rates.begun("none", 0.0)
    rates.begun("none", 0.0)
    rates.arrived(MB)
    rates.arrived(MB)
    rates.over(1.0)
    assert rates.link_rate == pytest.approx(2 * MB)


def test_what_the_chunks_took_replaces_the_first_guess() -> None:
    rates = PairRates((INT8,))
    link_of(rates, 1e8, 1.0)
    rates.coded("int8", MB, MB // 2, encode=0.02, decode=0.001)
    assert rates.choose(MB) == "int8", "one chunk had to wait"
    for _ in range(100):
        rates.coded("int8", MB, MB // 2, encode=1.0, decode=0.001)
    rates.coded("int8", MB, MB // 2, encode=0.0, decode=0.001)  # an older peer tells nothing
    assert rates.choose(MB) == "none", "the source encodes 1 MB/s"


def test_the_first_guess_is_measured_on_this_machine() -> None:
    figures = {one.codec: one for one in measure_figures(LAYOUT)}
    assert tuple(figures) == AUTO_CODECS and "sparse" not in figures
    assert all(one.encode_rate > 0 and one.decode_rate > 0 for one in figures.values())


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 12), st.integers(64, 1024), st.booleans())
def test_any_table_of_blocks_arrives_in_order_up_to_the_last_token(
    data: st.DataObject, blocks: int, chunk_bytes: int, lossy: bool
) -> None:
    """Guards tokens that land in another's place: tables are not ascending, nor the same (37)."""
    size = LAYOUT.block_size
    tokens = data.draw(st.integers((blocks - 1) * size + 1, blocks * size))
    theirs = data.draw(st.permutations(range(16)))[:blocks]
    ours = data.draw(st.permutations(range(16)))[:blocks]
    source, target = KvArena.create(LAYOUT, 16), KvArena.create(LAYOUT, 16)
    for layer in (0, 1, 3):
        for side in (source.k(layer), source.v(layer)):
            side.copy_(torch.randn(side.shape))
    out, into = EncodedChunks(source), EncodedChunks(target)
    codec: CodecName = "int8" if lossy else "none"
    for chunk in plan_encoded(LAYOUT, range(4), blocks, chunk_bytes):
        frames = out.encode(codec, chunk, theirs, tokens)
        assert into.fits(chunk, sum(map(len, frames)))
        into.decode(codec, chunk, ours, tokens, frames)
    for layer in (0, 1, 3):
        for their_side, our_side in (
            (source.k(layer), target.k(layer)),
            (source.v(layer), target.v(layer)),
        ):
            want = their_side[theirs].flatten(0, 1).float()
            got = our_side[ours].flatten(0, 1).float()
            slack = 0.03 * float(want.abs().max()) if lossy else 0.0
            assert ((got - want).abs()[:tokens] <= slack).all()
            assert (
                not got[tokens:].any()
                and not our_side[[b for b in range(16) if b not in ours]].any()
            )
    source.close()
    target.close()
