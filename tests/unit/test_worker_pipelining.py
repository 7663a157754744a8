"""Layer by layer only where it pays, and not a message for every small layer."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.ids import DispatchId, Incarnation, TransferId
from shared.messages.fleet import PairStatus, PipelineRule
from shared.messages.prefill_decode import OpenTransfer
from shared.messages.router_worker import Report, RouterBeat
from shared.worker.effects import ToRouter
from shared.worker.events import LayersWritten, PathChosen
from shared.worker.pipelining import (
    LEAST_BYTES,
    MOST_ANNOUNCEMENTS,
    PipelineGate,
    announced_layers,
)
from tests.unit.worker_bench import HELLO, SOURCE, Bench, request

SMOLLM2 = (768,) * 30
LARGE = (4096,) * 32


def visible(size: float, rate: float, layer_seconds: float, *, pipelined: bool) -> float:
    """Return for how long a request waits for ``size`` bytes in 32 layers over a link of ``rate``.

    With layers announced one by one each copy costs 50 us more, and what is left when the last
    layer is computed is that layer, or all that a slow link has not carried yet.
    """
    if not pipelined:
        return size / rate + 50e-6
    one = size / 32 / rate + 50e-6
    return max(one, 32 * one - 31 * layer_seconds)


def lived(gate: PipelineGate, seconds: Callable[[bool], float], times: int, tokens: int) -> int:
    """Hand over so often and return how many were pipelined."""
    pipelined = 0
    for _ in range(times):
        chosen = gate.choose(tokens)
        pipelined += chosen
        gate.arrived(tokens, seconds(chosen), pipelined=chosen)
    return pipelined


def over(rate: float, layer_seconds: float, size: float = 48e6) -> Callable[[bool], float]:
    return lambda pipelined: visible(size, rate, layer_seconds, pipelined=pipelined)


def test_a_slow_link_is_pipelined_and_still_compared_now_and_then() -> None:
    """Guards KV that travels only once prefill is over, where it could have come meanwhile."""
    gate = PipelineGate("auto")
    lived(gate, over(1e9, 4e-3), 8, 2048)
    assert lived(gate, over(1e9, 4e-3), 160, 2048) == 150
    assert gate.reason == "faster"


def test_a_link_as_fast_as_memory_with_little_to_carry_is_not() -> None:
    """Guards messages and copies beside prefill's compute that spare nobody anything."""
    gate = PipelineGate("auto")
    lived(gate, over(40e9, 0.1e-3, 1.5e6), 8, 60)
    assert lived(gate, over(40e9, 0.1e-3, 1.5e6), 160, 60) == 10
    assert gate.reason == "not_faster"


def test_a_link_that_becomes_slow_is_noticed_and_the_reverse() -> None:
    """Guards a decision of the first minute that is kept for ever."""
    gate = PipelineGate("auto")
    fast, slow = over(40e9, 0.1e-3, 1.5e6), over(1e8, 4e-3, 1.5e6)
    lived(gate, fast, 64, 60)
    lived(gate, slow, 64, 60)
    assert gate.reason == "faster"
    lived(gate, fast, 64, 60)
    assert gate.reason == "not_faster"


def test_prompts_of_other_lengths_are_judged_by_themselves() -> None:
    """Guards long prompts whose KV waits because short ones gain nothing."""
    gate = PipelineGate("auto")
    for _ in range(40):
        lived(gate, over(40e9, 0.1e-3, 1.5e6), 1, 60)
        lived(gate, over(1e9, 4e-3), 1, 2048)
    assert gate.choose(3000) and gate.reason == "faster"
    assert not gate.choose(50) and gate.reason == "not_faster"


def test_one_hand_over_that_hung_decides_nothing() -> None:
    gate = PipelineGate("auto")
    lived(gate, over(1e9, 4e-3), 64, 2048)
    for _ in range(2):
        gate.arrived(2048, 9.0, pipelined=True)
    assert gate.choose(2048) and gate.reason == "faster"


def test_what_never_arrives_does_not_keep_half_of_all_hand_overs_waiting() -> None:
    """Guards a pair under pressure, none of whose hand-overs says anything about its link."""
    gate = PipelineGate("auto")
    chosen = [gate.choose(2048) for _ in range(168)]
    assert chosen[:8].count(False) == 4 and chosen[8:].count(False) <= 11
    assert gate.reason == "measuring"


@pytest.mark.parametrize("rule", [True, False])
def test_what_the_file_says_is_never_measured_away(rule: PipelineRule) -> None:
    gate = PipelineGate(rule)
    lived(gate, over(40e9, 0.1e-3, 1.5e6), 40, 60)
    lived(gate, over(1e8, 4e-3), 40, 60)
    assert gate.choose(60) is rule and gate.reason == "configured"


def test_small_layers_wait_for_one_another_and_large_ones_do_not_flood() -> None:
    """Guards a message and a copy job for 4 KiB, and hundreds of them for a chunk."""
    assert announced_layers(SMOLLM2, 5) == (30,)
    assert announced_layers(SMOLLM2, 128) == (15, 25, 30)
    assert announced_layers(SMOLLM2, 512) == (7, 12, 17, 22, 25, 27, 29, 30)
    assert announced_layers(LARGE, 512) == (7, 13, 19, 23, 27, 29, 31, 32)
    assert announced_layers(LARGE, 8192) == announced_layers(LARGE, 512)
    assert announced_layers((1 << 20, 0, 0, 1), 1) == (1, 4), "layers that store nothing"
    assert announced_layers((0,) * 7, 9, 3) == (3, 6, 7)
    assert announced_layers((0,) * 6, 9, 3) == (3, 6)


@given(st.lists(st.integers(0, 1 << 16), min_size=1, max_size=80), st.integers(1, 8192))
def test_every_layer_is_announced_once_in_pieces_of_a_size(sizes: list[int], tokens: int) -> None:
    """Guards layers that are never told, so that KV waits for the end of the prefill."""
    ends = announced_layers(sizes, tokens)
    assert ends[-1] == len(sizes) and list(ends) == sorted(set(ends))
    assert len(ends) <= MOST_ANNOUNCEMENTS
    assert (len(ends) - 1) * LEAST_BYTES < max(1, sum(sizes) * tokens), "on average that much"
    for start, end in zip((0, *ends), ends, strict=False):
        assert any(sizes[start:end]) or end == len(sizes), "nobody is told of nothing"


def left_at_the_end(ends: Sequence[int], wire: float, compute: float) -> float:
    """Return how long after the last layer the last one is across a link.

    A layer takes ``wire`` to be sent and ``compute`` to be computed; from each announcement on
    everything not sent yet is still to be sent.
    """
    layers = ends[-1]
    return max(
        (layers - start) * wire - (layers - end) * compute
        for start, end in zip((0, *ends), ends, strict=False)
    )


def test_pieces_that_shrink_leave_less_to_wait_for() -> None:
    """Guards the last pieces, which alone a request waits for on a link that keeps up."""
    even = (4, 8, 12, 16, 20, 24, 28, 30)
    shrinking = announced_layers(SMOLLM2, 512)
    assert len(shrinking) == len(even), "for no more messages"
    for percent in range(1, 101):
        wire = percent / 100
        assert left_at_the_end(shrinking, wire, 1.0) <= left_at_the_end(even, wire, 1.0) + 3
        if percent <= 80:
            assert left_at_the_end(shrinking, wire, 1.0) < left_at_the_end(even, wire, 1.0)
    assert left_at_the_end(shrinking, 0.5, 1.0) == 0.5 * left_at_the_end(even, 0.5, 1.0)


def pair_of(bench: Bench) -> PairStatus:
    bench.said(RouterBeat(incarnation=Incarnation(1)))
    bench.tick(1.0)
    (report,) = [e.message for e in bench.all(ToRouter) if isinstance(e.message, Report)]
    (pair,) = report.pairs
    return pair


def handed_over(bench: Bench, number: int, seconds: Callable[[bool], float]) -> bool:
    """Hand one over whose copies take so long; return whether it was asked for layer by layer."""
    bench.expect(number, request(10, max_tokens=2), transfer=number)
    (message,) = [m for m in bench.to_source() if isinstance(m, OpenTransfer)]
    bench.ready(10, transfer=number)
    jobs = bench.effects
    bench.complete(10, transfer=number)
    bench.now += seconds(message.pipelined)
    bench.effects = jobs
    bench.copied()
    bench.step()
    assert bench.finished().dispatch == DispatchId(number)
    return message.pipelined


def test_a_reader_asks_each_time_as_its_own_hand_overs_say() -> None:
    """Guards a gate that nothing is told, or that nobody asks."""
    bench = Bench(pipeline="auto")
    bench.expect(1, request(10, max_tokens=2), transfer=1)
    bench.welcome()
    assert bench.to_source() == [OpenTransfer(transfer=TransferId(1))], "no path yet: no trial"
    bench.event(PathChosen(SOURCE, "host", "other_host"))
    bench.cancel(1)
    slow = [handed_over(bench, n, lambda on: 0.001 if on else 0.1) for n in range(2, 40)]
    assert slow[:6] == [True, False] * 3 and sum(slow[6:]) == 30
    pair = pair_of(bench)
    assert (pair.pipeline_reason, pair.pipelined, pair.transfers) == ("faster", 33, 38)
    assert pair.pipelined_visible_seconds == pytest.approx(0.033)
    assert pair.visible_seconds == pytest.approx(0.533)
    fast = [handed_over(bench, n, lambda on: 0.001) for n in range(40, 140)]
    assert sum(fast[-32:]) == 2 and pair_of(bench).pipeline_reason == "not_faster"


def test_a_source_announces_as_its_reader_asks_and_its_own_file_allows() -> None:
    """Guards a chunk that is told to one reader because another one wants it so."""
    late = OpenTransfer(transfer=TransferId(1), pipelined=False)
    for file, message, told in (
        ("auto", late, False),
        (True, late, False),
        ("auto", OpenTransfer(transfer=TransferId(1)), True),
        (False, OpenTransfer(transfer=TransferId(1)), False),
    ):
        for early in (True, False):
            bench = Bench(pipeline=file)
            bench.reader(HELLO)
            if early:
                bench.reader(message)
            bench.prefill(1, request(10))
            if not early:
                bench.reader(message)
            bench.event(LayersWritten(1, 1))
            assert bool(bench.to_reader()) is told
            bench.step()
            assert bench.running is not None and bool(bench.running.announce) is told
            bench.step()
            assert len(bench.to_reader()) == 2, "the rest, and the end"


def test_a_reader_may_change_its_mind_between_layers() -> None:
    """Guards layers told once and never again, or a gap, across a switch in the middle."""
    bench = Bench()
    bench.reader(HELLO)
    bench.prefill(1, request(10))
    bench.reader(OpenTransfer(transfer=TransferId(1)))
    bench.event(LayersWritten(1, 1))
    assert len(bench.to_reader()) == 1
    bench.reader(OpenTransfer(transfer=TransferId(1), pipelined=False))
    bench.step()
    assert bench.to_reader() == []
    bench.reader(OpenTransfer(transfer=TransferId(1)))
    assert len(bench.to_reader()) == 1
    bench.step()
    assert len(bench.to_reader()) == 2
