"""``diptych bench compare``: our engine and the peers' in turns, with ratios and goals."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs
from rich.console import Console

from shared.engine.model_files import resolve_model
from shared.engine.weights import read_config
from tools.bench.compare.goals import (
    Ratio,
    Verdict,
    judge,
    ratio_rows,
    ratios_of,
    verdict_rows,
)
from tools.bench.engine.command import race
from tools.bench.engine.contestant import Launch
from tools.bench.engine.figures import Plan
from tools.bench.engine.kv_bytes import kv_token_bytes
from tools.bench.engine.report import (
    EngineReport,
    as_table,
    print_problems,
    render_tables,
    write_report,
)
from tools.bench.engine.rounds import Entry
from tools.bench.peers.models import model_for
from tools.bench.peers.peer import Peer, engine_environment, environment
from tools.bench.terminal import print_table

_RATIO_NOTE = "Our milliseconds over the peer's: below 1 we are faster."
_GOAL_NOTE = "Goals: our milliseconds over the best named peer's, in this run."


class Comparison(EngineReport, frozen=True, kw_only=True):
    """Figures of all engines, and what follows from them."""

    ratios: list[Ratio]
    verdicts: list[Verdict]


def compare_engines(
    plan: Plan, ours: Sequence[Entry], peers: Sequence[Peer], out: Path, console: Console
) -> int:
    """Measure, print tables, write the report. Returns 1 if an engine failed, else 0."""
    entries = [*ours, *peer_entries(plan, peers)]
    figures = race(plan, entries, console)
    names = [facts.name for facts in figures.engines]
    report = Comparison(
        **structs.asdict(figures),
        ratios=ratios_of(figures.cells, plan.shapes, names),
        verdicts=judge(figures.cells, figures.growth),
    )
    ratios = ratio_rows(report.cells, plan.shapes, names)
    verdicts = verdict_rows(report.verdicts)
    page = write_report(report, out, [(ratios, _RATIO_NOTE), (verdicts, _GOAL_NOTE)])
    for table in render_tables(report):
        print_table(table, console)
    print_table(as_table(ratios, "", _RATIO_NOTE), console)
    print_table(as_table(verdicts, "", _GOAL_NOTE), console)
    print_problems(report, console)
    console.print(f"{page.with_name(page.stem + '.json')}\n{page}", soft_wrap=True, highlight=False)
    return 1 if any(facts.problem for facts in report.engines) else 0


def peer_entries(plan: Plan, peers: Sequence[Peer]) -> list[Entry]:
    """Return one entry per peer, its form of the model made if need be."""
    model_dir = resolve_model(plan.model)
    kv_bytes = plan.pool_tokens * kv_token_bytes(model_dir)
    positions = read_config(model_dir).get("max_position_embeddings")
    entries = []
    for peer in peers:
        options = {
            "model": str(model_for(peer, plan.model, model_dir)),
            "cores": plan.cores,
            "threads": len(plan.cores),
            "slots": plan.slots,
            "tokens": plan.pool_tokens,
            "longest": plan.longest,
            "positions": positions,
            "device": plan.device,
        }
        variables = environment(peer, plan.cores, kv_bytes) | engine_environment(peer)
        launch = Launch(
            name=peer.name,
            python=peer.python,
            module=peer.module,
            options=options,
            environment=variables,
        )
        entries.append(Entry(launch=launch, precision=peer.precision, ours=False))
    return entries
