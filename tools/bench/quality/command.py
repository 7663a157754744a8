"""``diptych bench quality``: table, JSON, page, and whether every bound holds."""

import os
from pathlib import Path

from msgspec import Struct
from rich.console import Console

from tools.bench.engine.command import ON_CPUS, kv_dtypes, precisions
from tools.bench.engine.report import MIB, as_table
from tools.bench.page import Rows, machine, now, processor, render_page, write_files
from tools.bench.plots import grouped_bars
from tools.bench.quality.gates import Gate, gate_for
from tools.bench.quality.measure import Loss, Plan, QualityRow, Variant, measure
from tools.bench.terminal import print_table

_NOTE = (
    "Loss against fp32 reading the same text: prefill reads windows whole, decode a token at a "
    "time. ms: one window's prompt; one sequence's step at 200 tokens. KL in nats per position "
    "over the 512 best tokens of both, all others as one. RSS after loading, a small KV pool "
    "included."
)


class QualityReport(Struct, frozen=True, kw_only=True):
    """One measurement and what it was made on."""

    title: str
    made_at: str
    machine: str
    load_average: float
    plan: Plan
    rows: list[QualityRow]
    breaches: list[str]


def variants(precision: str | None, kv_dtype: str | None) -> list[Variant]:
    """Return what to measure: all of CPUs unless named, their own KV and int8 unless named.

    fp8 is a GPU's, as is its KV, and is emulated (``emulated``).

    Raises:
        BadConfig: there is no such precision or KV dtype.
    """
    chosen = precisions(precision, ON_CPUS)
    if kv_dtype is not None:
        return [Variant(name, dtype) for name in chosen for dtype in kv_dtypes(kv_dtype)]
    own = [Variant(name) for name in chosen]
    return own + [Variant(name, "fp8" if name == "fp8" else "int8") for name in chosen]


def bench_quality(
    plan: Plan, chosen: list[Variant], out: Path, as_json: bool, console: Console
) -> int:
    """Measure, print, write. Returns 1 if a variant is outside its bounds, else 0."""
    rows = measure(plan, chosen, console)
    report = QualityReport(
        title=f"{plan.model}: quality by precision",
        made_at=now(),
        machine=f"{processor()}, {machine()}",
        load_average=os.getloadavg()[0],
        plan=plan,
        rows=rows,
        breaches=[breach for row in rows for breach in breaches(row)],
    )
    table = quality_rows(rows)
    charts = [
        grouped_bars(
            "Mean KL to fp32 (nats)",
            [row.label for row in rows],
            {"prefill": [r.prefill.kl for r in rows], "decode": [r.decode.kl for r in rows]},
        )
    ]
    facts = (report.made_at, report.machine, f"load average {report.load_average:.1f}")
    page = render_page(report.title, facts, [(table, _NOTE)], report.breaches, charts)
    written, shown = write_files(report, page, out)
    print_table(as_table(table, report.title, _NOTE), console)
    for breach in report.breaches:
        console.print(breach, style="red", markup=False)
    console.print(f"{written}\n{shown}", soft_wrap=True, highlight=False)
    if as_json:
        print(written.read_text(encoding="utf-8"), end="")
    return 1 if report.breaches else 0


def quality_rows(rows: list[QualityRow]) -> Rows:
    """Return two rows per precision, one per phase."""
    header = ["precision", "phase", "KV", "RSS MiB", "ms", "perplexity", "change", "top-1", "KL"]
    body = [
        [
            row.precision,
            phase,
            row.kv_dtype,
            f"{row.rss / MIB:,.0f}",
            f"{milliseconds:.1f}",
            f"{lost.perplexity:.3f}",
            f"{lost.perplexity_change:+.2%}",
            f"{lost.top1:.2%}",
            f"{lost.kl:.5f}",
        ]
        for row in rows
        for phase, milliseconds, lost in (
            ("prefill", row.prefill_ms, row.prefill),
            ("decode", row.decode_ms, row.decode),
        )
    ]
    return [header, *body]


def breaches(row: QualityRow) -> list[str]:
    """Say where a variant is outside its bounds."""
    gate = gate_for(row.precision, row.kv_dtype)
    return [
        f"{row.label}, {phase}: {what}"
        for phase, lost in (("prefill", row.prefill), ("decode", row.decode))
        for what in _outside(gate, lost)
    ]


def _outside(gate: Gate, lost: Loss) -> list[str]:
    found = []
    if lost.top1 < gate.top1:
        found.append(f"top-1 agreement {lost.top1:.2%} is below {gate.top1:.2%}")
    if lost.perplexity_change > gate.perplexity:
        found.append(f"perplexity +{lost.perplexity_change:.2%} is above +{gate.perplexity:.2%}")
    if lost.kl > gate.kl:
        found.append(f"KL {lost.kl:.5f} is above {gate.kl:.5f}")
    return found
