"""The result of a measurement as table, JSON and one self-contained HTML page."""

from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.table import Table

from shared.config import Deployment
from tools.bench.page import machine, now, render_page, write_files
from tools.bench.plots import latency_chart, phase_chart, throughput_chart
from tools.bench.serve import Plan
from tools.bench.summary import LevelSummary, Spread

_EXPLANATION = (
    "Times in ms as p50 / p99. "
    "TTFT: request sent to first text at the client. TPOT: (last - first token) / (tokens - 1). "
    "ITL: single gaps between events. Phases come from the servers' own timelines: queue + "
    "prefill + transfer = TTFT at the gateway. Hand-over: first token sampled by prefill to "
    "decode's first own token, minus one decode step."
)


class Report(Struct, frozen=True, kw_only=True):
    """One measurement and what it was made on.

    ``load``: average of the minute before it began. ``deployment``: the file with its defaults,
    without API keys; None of a server that is not ours.
    """

    title: str
    url: str
    model: str
    made_at: str
    machine: str
    load: float
    deployment: dict[str, object] | None
    plan: Plan
    levels: list[LevelSummary]


class Server(Struct, frozen=True, kw_only=True):
    """What is measured. ``load``: of the machine before; ``deployment``: None if not ours."""

    url: str
    api_key: str | None
    load: float
    deployment: Deployment | None = None


def make_report(server: Server, model: str, plan: Plan, levels: list[LevelSummary]) -> Report:
    """Put the numbers together with time and machine."""
    return Report(
        title=f"{model}: {plan.input_words} words in, {plan.output_tokens} tokens out",
        url=server.url,
        model=model,
        made_at=now(),
        machine=machine(),
        load=server.load,
        deployment=None if server.deployment is None else _public(server.deployment),
        plan=plan,
        levels=levels,
    )


def _public(deployment: Deployment) -> dict[str, object]:
    tree: dict[str, object] = msgspec.to_builtins(deployment)
    gateway = tree["gateway"]
    assert isinstance(gateway, dict)
    gateway.pop("api_keys", None)
    return tree


def write_report(report: Report, base: Path) -> tuple[Path, Path]:
    """Write ``base``.json and ``base``.html and return both."""
    return write_files(report, render_html(report), base)


def rows(levels: list[LevelSummary]) -> list[list[str]]:
    """Return the table: one row per quantity, one column per level, names first."""
    header = ["clients", *(str(level.concurrency) for level in levels)]
    body = [[name, *(show(level) for level in levels)] for name, show in _ROWS]
    return [header, *body]


def render_table(report: Report) -> Table:
    """Return the table for the terminal."""
    header, *body = rows(report.levels)
    table = Table(title=report.title, caption="times in ms as p50 / p99")
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left")
    for cells in body:
        table.add_row(*cells)
    return table


def render_html(report: Report) -> str:
    """Return the page; it loads nothing from anywhere."""
    charts = [
        latency_chart("TTFT", report.levels, lambda level: level.ttft),
        latency_chart("TPOT", report.levels, lambda level: level.tpot),
        latency_chart("ITL", report.levels, lambda level: level.itl),
        throughput_chart(report.levels),
        phase_chart(report.levels),
    ]
    return render_page(
        report.title,
        (report.made_at, report.machine, f"load {report.load:.1f} before", report.url),
        [(rows(report.levels), _EXPLANATION)],
        sorted({error for level in report.levels for error in level.errors}),
        charts,
    )


def _pair(values: Spread | None) -> str:
    return "-" if values is None else f"{_ms(values.p50)} / {_ms(values.p99)}"


def _ms(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def _requests(level: LevelSummary) -> str:
    return f"{level.requests} ({level.failed} failed)" if level.failed else str(level.requests)


def _control(level: LevelSummary) -> str:
    return "-" if level.control_cpu_us is None else f"{level.control_cpu_us:.0f}"


_ROWS: list[tuple[str, Callable[[LevelSummary], str]]] = [
    ("requests", _requests),
    ("prompt tokens, mean", lambda level: f"{level.prompt_tokens:.0f}"),
    ("requests split", lambda level: f"{100 * level.split_share:.0f} %"),
    ("output tokens/s", lambda level: f"{level.output_rate:.1f}"),
    ("requests/s", lambda level: f"{level.request_rate:.2f}"),
    ("TTFT", lambda level: _pair(level.ttft)),
    ("  queue", lambda level: _pair(level.phases.queue)),
    ("  prefill", lambda level: _pair(level.phases.prefill)),
    ("  transfer to gateway", lambda level: _pair(level.phases.transfer)),
    ("TPOT", lambda level: _pair(level.tpot)),
    ("ITL", lambda level: _pair(level.itl)),
    ("latency", lambda level: _pair(level.latency)),
    ("KV transfer", lambda level: _pair(level.phases.kv_transfer)),
    ("first decode step", lambda level: _pair(level.phases.first_step)),
    ("decode step", lambda level: _pair(level.phases.decode_step)),
    ("hand-over beside a step", lambda level: _pair(level.phases.hand_over)),
    ("router+gateway µs/token", _control),
    ("load client CPU", lambda level: f"{100 * level.client_cpu_share:.0f} %"),
]
