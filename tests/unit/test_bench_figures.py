"""Figures of engines: what is reduced, related and judged is what was measured."""

from io import StringIO

import pytest
from rich.console import Console

from shared.errors import BadConfig
from tools.bench.compare.goals import judge, ratio_rows, verdict_rows
from tools.bench.engine.figures import (
    Cell,
    EngineFacts,
    Plan,
    SamplingKind,
    Shape,
    cell,
    growth,
    host_shapes,
    make_shapes,
    parse_numbers,
)
from tools.bench.engine.report import (
    host_rows,
    make_report,
    memory_rows,
    print_problems,
    render_tables,
    speed_rows,
)

SHORT = Shape("decode", 1, 200)
WIDE = Shape("decode", 16, 200)
LONG = Shape("decode", 1, 8000)
PROMPT = Shape("prefill", 1, 1024)


def figures(engine: str, shape: Shape, milliseconds: float) -> Cell:
    return cell(engine, shape, [[1e-3 * milliseconds]])


def test_one_slow_turn_or_step_does_not_move_the_median() -> None:
    """Guards: a neighbour's burst in one turn decides the result."""
    reduced = cell("x", WIDE, [[0.010, 0.010, 9.0], [0.012] * 3, [5.0] * 3])
    assert reduced.median == pytest.approx(12.0)
    assert (reduced.least, reduced.most, reduced.turns) == (
        pytest.approx(10.0),
        pytest.approx(5000.0),
        3,
    )
    assert reduced.rate == pytest.approx(16 / 0.012)
    assert figures("x", PROMPT, 512.0).rate == pytest.approx(2000.0)


def test_shapes_are_every_batch_once_and_long_contexts_alone() -> None:
    """Guards: 16 sequences of 8,000 tokens would be minutes of prefill nobody asked for."""
    assert make_shapes([1, 16], [200, 8000], [1024]) == (SHORT, WIDE, LONG, PROMPT)


def test_memory_of_a_plan_covers_its_largest_shape() -> None:
    """Guards: a run that ends minutes in because the KV pool is too small."""
    plan = Plan(model="m", shapes=(SHORT, WIDE, LONG, PROMPT), rounds=1, steps=24, cores=(0,))
    assert plan.slots == 16
    assert plan.longest >= 8000 + 24
    assert plan.pool_tokens >= max(8000 + 24, 16 * (200 + 24), 1024)


def test_what_is_not_the_models_has_rows_of_its_own() -> None:
    """Guards: a column of tokens/s where there are none, or a sampling that shows nowhere."""
    samplings: tuple[SamplingKind, ...] = ("greedy", "mixed")
    decodes = make_shapes([1], [200], [1024], samplings)
    assert [shape.label for shape in decodes] == [
        "decode B=1 at 200",
        "decode B=1 at 200, mixed",
        "prefill 1,024",
    ]
    shapes = host_shapes([1, 16], 200, samplings)
    assert [(s.batch, s.sampling) for s in shapes[1:3]] == [(16, "greedy"), (1, "mixed")]
    plan = Plan(model="m", shapes=(*decodes, *shapes), rounds=1, steps=1, cores=(0,))
    assert plan.pool_tokens >= 16 * (200 + 64), "our scheduler would never run all 16 at once"
    facts = EngineFacts(name="x", precision="bf16")
    report = make_report(plan, [facts], [figures("x", shapes[1], 0.5)], 0.0)
    assert len(speed_rows(report)[0]) == 4
    assert host_rows(report) == [
        ["host ms/step", "B=1, greedy", "B=16, greedy", "B=1, mixed", "B=16, mixed"],
        ["x", "-", "0.50", "-", "-"],
    ]
    assert len(render_tables(report)) == 3


@pytest.mark.parametrize("text", ["", "0", "1,x", "-4", "1,,2"])
def test_numbers_that_are_none(text: str) -> None:
    with pytest.raises(BadConfig, match="--batch"):
        parse_numbers("--batch", text)


def test_context_growth_is_related_to_copying_its_kv() -> None:
    """7,800 tokens of 1,000 bytes at 1 GB/s are 7.8 ms; 15.6 ms more is twice that."""
    facts = EngineFacts(name="x", precision="bf16", kv_token_bytes=1000.0, copy_rate=1e9)
    cells = [figures("x", SHORT, 5.0), figures("x", LONG, 20.6), figures("x", WIDE, 9.0)]
    found = growth(facts, cells)
    assert found is not None and found.ratio == pytest.approx(2.0)
    assert growth(facts, cells[:1]) is None
    assert growth(EngineFacts(name="x", precision="bf16"), cells) is None


def test_goals_compare_with_the_better_peer_of_the_same_shape() -> None:
    """Guards: a goal that looks met since it was judged against the slower peer."""
    cells = [
        figures("diptych-bf16", PROMPT, 300.0),
        figures("diptych-int8", SHORT, 6.0),
        figures("vllm-cpu-bf16", PROMPT, 400.0),
        figures("vllm-cpu-w8a8", PROMPT, 320.0),
        figures("vllm-cpu-bf16", SHORT, 18.0),
        figures("llama.cpp", SHORT, 7.0),
    ]
    verdicts = {(v.what, v.peer): v for v in judge(cells, [])}
    prompt = verdicts[PROMPT.label, "vllm-cpu-w8a8"]
    assert prompt.ratio == pytest.approx(300 / 320) and not prompt.met
    assert not verdicts[SHORT.label, "llama.cpp"].met
    assert verdicts[SHORT.label, "vllm-cpu-bf16"].ratio == pytest.approx(1 / 3)
    assert len(verdicts) == 3, "goals without figures are left out"
    assert len(verdict_rows(list(verdicts.values()))) == 4


def test_a_goal_holds_for_each_kv_dtype_of_a_precision() -> None:
    """Guards figures with another KV dtype that nobody judges, or judges by another precision's."""
    cells = [
        figures("diptych-int8-kv-bf16", SHORT, 6.0),
        figures("diptych-int8-kv-int8", SHORT, 5.0),
        figures("vllm-cpu-w8a8", SHORT, 16.0),
    ]
    verdicts = judge(cells, [])
    assert [(v.ours, v.met) for v in verdicts] == [
        ("diptych-int8-kv-bf16", False),
        ("diptych-int8-kv-int8", True),
    ]


def test_ratios_are_ours_over_theirs() -> None:
    cells = [figures("diptych-bf16", SHORT, 6.0), figures("peer", SHORT, 12.0)]
    rows = ratio_rows(cells, (SHORT, LONG), ["diptych-bf16", "peer"])
    assert rows[1:] == [["diptych-bf16 / peer", "0.50", "-"]]


def test_an_engine_that_failed_is_a_row_of_dashes() -> None:
    """Guards: one broken peer takes the report of all others with it."""
    plan = Plan(model="m", shapes=(SHORT,), rounds=1, steps=1, cores=(0,))
    engines = [
        EngineFacts(name="good", precision="bf16", load_seconds=1.0, loaded_rss=1 << 20),
        EngineFacts(name="bad", precision="int8", problem="no such file"),
    ]
    report = make_report(plan, engines, [figures("good", SHORT, 5.0)], 0.0)
    assert speed_rows(report)[1:] == [["good", "5.0 (200)"], ["bad", "-"]]
    assert memory_rows(report)[2][3:5] == ["-", "- / -"]
    assert len(render_tables(report)) == 2
    said = StringIO()
    print_problems(report, Console(file=said))
    assert said.getvalue() == "bad: no such file\n"
