"""Numbers of a report are what the records say; the page stands alone."""

import io
import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console

from shared.config import load_deployment
from tools.bench.records import Record, Timeline
from tools.bench.report import (
    Report,
    Server,
    make_report,
    render_html,
    render_table,
    rows,
    write_report,
)
from tools.bench.serve import Plan
from tools.bench.summary import Cost, spread, summarise

keeps_fonts_open = pytest.mark.keeps("fds")
"""matplotlib keeps the font files it used open for the life of the process."""

CONFIG = Path(__file__).parents[2] / "configs" / "local.yaml"
PLAN = Plan(input_words=400, output_tokens=4, levels=(2,), requests=None, seed=0, timeout=60.0)


def timeline() -> Timeline:
    return msgspec.convert(
        {
            "split": True,
            "retries": 1,
            "phases": {"queue": 0.01, "prefill": 0.07, "transfer": 0.02},
            "second_token": {"transfer": 0.004, "first_step": 0.011},
            "moments": {"received": 1.0, "decode": {"stepped": 10.0, "finished": 10.02}},
        },
        Timeline,
    )


def record(sent: float, error: str | None = None) -> Record:
    return Record(
        sent=sent,
        events=(sent + 0.1, sent + 0.12, sent + 0.16, sent + 0.19),
        ended=sent + 0.2,
        prompt_tokens=400,
        output_tokens=4,
        timeline=timeline(),
        error=error,
    )


def report() -> Report:
    records = [record(0.0), record(0.2), record(0.0, "<broken>"), record(0.1)]
    level = summarise(2, records, Cost(control=0.0012, client=0.04))
    deployment = load_deployment(CONFIG)
    gateway = msgspec.structs.replace(deployment.gateway, api_keys={"secret-key-0001": "tenant"})
    deployment = msgspec.structs.replace(deployment, gateway=gateway)
    server = Server(url="http://h:1", api_key="secret-key-0001", load=1.25, deployment=deployment)
    return make_report(server, "m", PLAN, [level])


def test_numbers() -> None:
    (level,) = report().levels
    assert (level.requests, level.failed, level.output_tokens) == (4, 1, 12)
    assert level.seconds == pytest.approx(0.4)
    assert level.output_rate == pytest.approx(30.0)
    assert level.ttft is not None and level.ttft.p50 == pytest.approx(100.0)
    assert level.tpot is not None and level.tpot.p50 == pytest.approx(30.0)
    assert level.itl is not None and level.itl.count == 9
    assert level.control_cpu_us == pytest.approx(100.0)
    assert level.retries == 3


def test_hand_over_is_what_comes_on_top_of_one_step() -> None:
    """Guards: 4 ms transfer + 11 ms first step - 10 ms decode step = 5 ms."""
    (level,) = report().levels
    assert level.phases.decode_step is not None
    assert level.phases.decode_step.p50 == pytest.approx(10.0)
    assert level.phases.hand_over is not None
    assert level.phases.hand_over.p50 == pytest.approx(5.0)


def test_phases_add_up_to_the_first_token() -> None:
    (level,) = report().levels
    phases = level.phases
    assert phases.queue and phases.prefill and phases.transfer
    total = phases.queue.p50 + phases.prefill.p50 + phases.transfer.p50
    assert total == pytest.approx(100.0)


def test_nothing_measured_is_no_number() -> None:
    """Guards: a level of failures prints dashes instead of dividing by zero."""
    assert spread([]) is None
    level = summarise(8, [record(0.0, "x")], Cost(control=None, client=0.0))
    assert ["TTFT", "-"] in rows([level])
    assert ["output tokens/s", "0.0"] in rows([level])


def test_three_levels_fit_80_columns() -> None:
    """Guards: seconds of latency in the default levels do not break the table's cells."""
    level = summarise(16, [record(0.0), record(123.0)], Cost(control=1.0, client=0.0))
    slow = spread([12.3456, 98.7654])
    level = msgspec.structs.replace(level, ttft=slow, tpot=slow, itl=slow, latency=slow)
    console = Console(file=io.StringIO(), width=80)
    console.print(render_table(msgspec.structs.replace(report(), levels=[level] * 3)))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    slow_rows = [line for line in lines if re.search("TTFT|TPOT|ITL|latency", line)]
    assert [line.count(" / ") for line in slow_rows] == [3, 3, 3, 3]


@keeps_fonts_open
def test_the_page_loads_nothing_and_escapes() -> None:
    """Guards: the report opens offline, years later, and a message cannot inject markup."""
    page = render_html(report())
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert "<script" not in page and "@import" not in page
    assert "<broken>" not in page and "&lt;broken&gt;" in page
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) == 5
    for chart in charts:
        ElementTree.fromstring(chart)


@keeps_fonts_open
def test_json_holds_every_number(tmp_path: Path) -> None:
    as_json, as_html = write_report(report(), tmp_path / "deep" / "run")
    again = msgspec.json.decode(as_json.read_bytes(), type=Report)
    assert again.levels == report().levels
    assert as_html.read_text().startswith("<!DOCTYPE html>")


def test_a_report_says_what_was_measured_and_keeps_its_keys_secret() -> None:
    """Guards figures nobody can repeat, and API keys in files that are passed around."""
    made = report()
    text = msgspec.json.encode(made).decode() + render_html(made)
    assert "secret-key-0001" not in text
    assert "load 1.2 before" in text
    assert made.deployment is not None
    assert made.deployment["workers"]["decode"]["precision"] == "int8"  # type: ignore[index]
