"""Figures of engines as table, JSON and page; the same for Diptych alone and beside peers."""

import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from tools.bench.engine.figures import Cell, EngineFacts, Growth, Plan, Shape, growth
from tools.bench.page import Rows, machine, now, processor, render_page, write_files
from tools.bench.plots import grouped_bars

MIB = 1 << 20

_NOTE = (
    "Median over rounds of each turn's median, in ms, and tokens per second. Engines take turns "
    "on the same cores, all loaded, the others stopped. A decode step is one token for each of B "
    "sequences that are that long already."
)
_HOST_NOTE = (
    "of a decode step what is not the model's: schedule, pack, sample, messages (no sockets)"
)
_MEMORY_NOTE = (
    "Load: from the process's first import to ready. RSS: after loading / after the last turn. "
    "The KV pool is part of the second and as large as the longest shape needs."
)


class EngineReport(Struct, frozen=True, kw_only=True):
    """``load_average`` (one minute) at the start and at the end: others on the machine."""

    title: str
    made_at: str
    machine: str
    load_average: tuple[float, float]
    plan: Plan
    engines: list[EngineFacts]
    cells: list[Cell]
    growth: list[Growth]


def make_report(
    plan: Plan, engines: list[EngineFacts], cells: list[Cell], load_before: float
) -> EngineReport:
    """Put figures together with time and machine."""
    grown = [found for facts in engines if (found := growth(facts, cells)) is not None]
    return EngineReport(
        title=f"{plan.model}: engines on {len(plan.cores)} cores",
        made_at=now(),
        machine=f"{processor()}, {machine()}",
        load_average=(load_before, os.getloadavg()[0]),
        plan=plan,
        engines=engines,
        cells=cells,
        growth=grown,
    )


def find(cells: Sequence[Cell], engine: str, shape: Shape) -> Cell | None:
    """Return one engine's figures at one shape."""
    return next((c for c in cells if c.engine == engine and c.shape == shape), None)


def speed_rows(report: EngineReport) -> Rows:
    """Return one row per engine, one column per shape of model and sampling together."""
    shapes = [shape for shape in report.plan.shapes if shape.kind != "host"]
    body = [
        [facts.name, *(_speed(find(report.cells, facts.name, shape)) for shape in shapes)]
        for facts in report.engines
    ]
    return [["engine", *(shape.label for shape in shapes)], *body]


def host_rows(report: EngineReport) -> Rows:
    """Return one row per engine, one column per batch and sampling; only a header without any."""
    shapes = [shape for shape in report.plan.shapes if shape.kind == "host"]
    body = [
        [facts.name, *(_host(find(report.cells, facts.name, shape)) for shape in shapes)]
        for facts in report.engines
    ]
    header = [f"B={shape.batch}, {shape.sampling}" for shape in shapes]
    return [["host ms/step", *header], *(body if shapes else [])]


def memory_rows(report: EngineReport) -> Rows:
    """Return load time and memory of every engine, and what its context costs."""
    header = ["engine", "precision", "KV", "load s", "RSS MiB", "KV pool MiB", "context growth"]
    grown = {found.engine: found for found in report.growth}
    body = [
        [
            facts.name,
            facts.precision,
            facts.kv_dtype or "-",
            "-" if facts.load_seconds is None else f"{facts.load_seconds:.1f}",
            f"{_mib(facts.loaded_rss)} / {_mib(facts.rss)}",
            _mib(facts.kv_pool_bytes),
            _growth(grown.get(facts.name)),
        ]
        for facts in report.engines
    ]
    return [header, *body]


def render_tables(report: EngineReport) -> list[Table]:
    """Return the tables for a terminal."""
    host = host_rows(report)
    return [
        as_table(speed_rows(report), report.title, "median ms (tokens/s)"),
        *([as_table(host, "", _HOST_NOTE)] if len(host) > 1 else []),
        as_table(memory_rows(report), "", _loads(report)),
    ]


def print_problems(report: EngineReport, console: Console) -> None:
    """Say of each engine without figures why it has none."""
    for line in _problems(report):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def write_report(report: EngineReport, base: Path, more: Sequence[tuple[Rows, str]] = ()) -> Path:
    """Write ``base``.json and ``base``.html (returned); ``more`` tables go to the page only."""
    plan = report.plan
    names = [facts.name for facts in report.engines]
    charts = []
    for kind, title in (("decode", "Decode step (ms)"), ("prefill", "Prefill (ms)")):
        shapes = [shape for shape in plan.shapes if shape.kind == kind]
        if shapes:
            bars = {name: [_median(report, name, shape) for shape in shapes] for name in names}
            labels = [shape.label.removeprefix(f"{kind} ") for shape in shapes]
            charts.append(grouped_bars(title, labels, bars))
    host = host_rows(report)
    tables = [*more, *([(host, _HOST_NOTE)] if len(host) > 1 else [])]
    page = render_page(
        report.title,
        (report.made_at, report.machine, _loads(report), f"{plan.rounds} rounds"),
        [(speed_rows(report), _NOTE), *tables, (memory_rows(report), _MEMORY_NOTE)],
        _problems(report),
        charts,
    )
    return write_files(report, page, base)[1]


def _problems(report: EngineReport) -> list[str]:
    return [f"{facts.name}: {facts.problem}" for facts in report.engines if facts.problem]


def as_table(rows: Rows, title: str, caption: str) -> Table:
    """Return rows for a terminal, names left and numbers right."""
    header, *body = rows
    table = Table(title=title, caption=caption)
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left")
    for cells in body:
        table.add_row(*cells)
    return table


def _speed(found: Cell | None) -> str:
    return "-" if found is None else f"{found.median:.1f} ({found.rate:,.0f})"


def _host(found: Cell | None) -> str:
    return "-" if found is None else f"{found.median:.2f}"


def _median(report: EngineReport, name: str, shape: Shape) -> float:
    found = find(report.cells, name, shape)
    return float("nan") if found is None else found.median


def _growth(found: Growth | None) -> str:
    return "-" if found is None else f"+{found.added:.1f} ms, {found.ratio:.2f}x the copy"


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:,.0f}"


def _loads(report: EngineReport) -> str:
    before, after = report.load_average
    return f"load average {before:.1f} before, {after:.1f} after"
