"""Servers in turns under the load of ``diptych bench serve``: the peers' and ours.

All peers' servers are started once and stopped by signal while others have their turn. Ours
starts for each of its turns, since stopping its processes would look like failures to it.
"""

import contextlib
import os
import signal
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from msgspec import Struct, structs
from rich.console import Console

from shared.config import Deployment
from shared.errors import BadConfig
from tools.bench.command import gateway_url, started
from tools.bench.compare.goals import Verdict, verdict, verdict_rows
from tools.bench.compare.server import Server, serving
from tools.bench.cpu import control_pids
from tools.bench.engine.report import as_table
from tools.bench.page import Rows, machine, now, processor, render_page, write_files
from tools.bench.peers.peer import Peer
from tools.bench.plots import grouped_bars
from tools.bench.serve import Plan, measure, served_model
from tools.bench.sse_client import Target
from tools.bench.summary import LevelSummary, Spread
from tools.bench.terminal import print_table

OURS = "diptych"
_VLLM = ("vllm-cpu-bf16", "vllm-cpu-w8a8")
_GOAL_CLIENTS = 16
_SEEDS_OF_A_TURN = 1000
"""More than a turn has levels: each level takes a seed of its own."""


class Served(Struct, frozen=True, kw_only=True):
    """Medians over rounds of one server at one concurrency; times in ms, None where unknown."""

    server: str
    concurrency: int
    output_rate: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    itl_p50: float | None
    itl_p99: float | None
    failed: int


class ServedRatio(Struct, frozen=True, kw_only=True):
    """Ours over another server's at one concurrency, None where one of them is unknown."""

    server: str
    concurrency: int
    output_rate: float | None
    ttft_p50: float | None
    itl_p99: float | None


class ServedReport(Struct, frozen=True, kw_only=True):
    """``load_average`` (one minute) at the start and at the end: others on the machine."""

    title: str
    made_at: str
    machine: str
    load_average: tuple[float, float]
    config: str
    plan: Plan
    rounds: int
    served: list[Served]
    ratios: list[ServedRatio]
    verdicts: list[Verdict]


def serve_in_turns(
    deployment: Deployment,
    config: Path,
    peers: Sequence[Peer],
    plan: Plan,
    rounds: int,
    console: Console,
) -> list[Served]:
    """Return figures of ours and of every peer at every concurrency level.

    Raises:
        ResourceMissing: a server does not start; with the place of its log.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    turns: dict[str, Callable[[Plan], list[LevelSummary]]] = {
        OURS: lambda turn: _our_turn(deployment, config, turn, console)
    }
    with contextlib.ExitStack() as stack:
        for peer in peers:
            console.print(f"starting {peer.name}", highlight=False)
            server = stack.enter_context(serving(peer, deployment.model.path, cores))
            server.signal(signal.SIGSTOP)
            turns[peer.name] = partial(_peers_turn, server, console)
        names = list(turns)
        levels: dict[str, list[list[LevelSummary]]] = {name: [] for name in names}
        for number in range(rounds):
            # Other prompts every round: the peers' servers live on, and would have them cached.
            turn = structs.replace(plan, seed=plan.seed + number * _SEEDS_OF_A_TURN)
            # Each round starts with another one: whoever follows a heavy one finds its heat.
            first = number % len(names)
            for name in names[first:] + names[:first]:
                levels[name].append(turns[name](turn))
    return [
        _median(name, [turn[number] for turn in mine])
        for name, mine in levels.items()
        for number in range(len(plan.levels))
    ]


def served_verdicts(served: Sequence[Served]) -> list[Verdict]:
    """Judge ours against the better vLLM at the goals' concurrency."""
    at_goal = [one for one in served if one.concurrency == _GOAL_CLIENTS]
    ours = next((one for one in at_goal if one.server == OURS), None)
    others = [one for one in at_goal if one.server in _VLLM]
    if ours is None or not others:
        return []
    best = max(others, key=lambda one: one.output_rate or 0.0)
    goals: list[tuple[str, float | None, float | None, float]] = [
        ("seconds per token", best.output_rate, ours.output_rate, 1 / 1.5),
        ("ITL p99", ours.itl_p99, best.itl_p99, 0.2),
        ("TTFT p50", ours.ttft_p50, best.ttft_p50, 1.0),
    ]
    return [
        verdict(f"{what}, {_GOAL_CLIENTS} clients", OURS, best.server, above / below, bound)
        for what, above, below, bound in goals
        if above is not None and below
    ]


def write_served(report: ServedReport, base: Path, console: Console) -> None:
    """Print the tables; write ``base``.json and ``base``.html."""
    rows, verdicts = served_rows(report.served), verdict_rows(report.verdicts)
    levels = sorted({one.concurrency for one in report.served})
    names = list(dict.fromkeys(one.server for one in report.served))
    figures: list[tuple[str, Callable[[Served], float | None]]] = [
        ("Output tokens per second", lambda one: one.output_rate),
        ("ITL p99 (ms)", lambda one: one.itl_p99),
        ("TTFT p50 (ms)", lambda one: one.ttft_p50),
    ]
    charts = []
    for title, pick in figures:
        found = {(one.server, one.concurrency): pick(one) for one in report.served}
        bars = {n: [found.get((n, c)) or float("nan") for c in levels] for n in names}
        charts.append(grouped_bars(title, [str(c) for c in levels], bars))
    before, after = report.load_average
    facts = (report.made_at, report.machine, f"load average {before:.1f}, then {after:.1f}")
    notes = "Times in ms, medians over rounds; the last ratios are ours over the server's."
    goals = "Goals: ours over the better vLLM's, smaller is better."
    page = render_page(report.title, facts, [(rows, notes), (verdicts, goals)], [], charts)
    as_json, as_html = write_files(report, page, base)
    print_table(as_table(rows, report.title, notes), console)
    print_table(as_table(verdicts, "", goals), console)
    console.print(f"{as_json}\n{as_html}", soft_wrap=True, highlight=False)


def compare_serving(
    deployment: Deployment,
    config: Path,
    peers: Sequence[Peer],
    plan: Plan,
    rounds: int,
    out: Path,
    console: Console,
) -> int:
    """Measure in turns on all of this process's cores. Returns 1 if a request failed, else 0.

    Raises:
        BadConfig: a peer has no server.
    """
    silent = [peer.name for peer in peers if peer.server is None]
    if silent:
        raise BadConfig(f"{silent[0]} is measured without a server only: leave out --serving")
    load = os.getloadavg()[0]
    served = serve_in_turns(deployment, config, peers, plan, rounds, console)
    report = ServedReport(
        title=f"{deployment.model.path}: {plan.input_words} words in, {plan.output_tokens} out",
        made_at=now(),
        machine=f"{processor()}, {machine()}",
        load_average=(load, os.getloadavg()[0]),
        config=str(config),
        plan=plan,
        rounds=rounds,
        served=served,
        ratios=served_ratios(served),
        verdicts=served_verdicts(served),
    )
    write_served(report, out, console)
    return 1 if any(one.failed for one in served) else 0


def served_ratios(served: Sequence[Served]) -> list[ServedRatio]:
    """Return what ours is relative to every server, itself included, in the order of ``served``."""
    ours = {one.concurrency: one for one in served if one.server == OURS}
    return [
        ServedRatio(
            server=one.server,
            concurrency=one.concurrency,
            output_rate=_ratio(ours[one.concurrency].output_rate, one.output_rate),
            ttft_p50=_ratio(ours[one.concurrency].ttft_p50, one.ttft_p50),
            itl_p99=_ratio(ours[one.concurrency].itl_p99, one.itl_p99),
        )
        for one in served
    ]


def served_rows(served: Sequence[Served]) -> Rows:
    """Return one row per server and level, and what ours is relative to it."""
    body = []
    for one, ratio in zip(served, served_ratios(served), strict=True):
        body.append(
            [
                one.server,
                str(one.concurrency),
                _number(one.output_rate),
                f"{_number(one.ttft_p50)} / {_number(one.ttft_p99)}",
                _number(one.tpot_p50),
                f"{_number(one.itl_p50)} / {_number(one.itl_p99)}",
                *(_number(r, 2) for r in (ratio.output_rate, ratio.ttft_p50, ratio.itl_p99)),
                str(one.failed),
            ]
        )
    header = ["server", "clients", "tokens/s", "TTFT p50 / p99", "TPOT p50", "ITL p50 / p99"]
    return [[*header, "ours/it tokens/s", "TTFT p50", "ITL p99", "failed"], *body]


def _our_turn(
    deployment: Deployment, config: Path, plan: Plan, console: Console
) -> list[LevelSummary]:
    with started(deployment, config, console):
        url = gateway_url(deployment)
        key = next(iter(deployment.gateway.api_keys or {}), None)
        model = served_model(url, key)
        return measure(Target.parse(url, key), model, plan, control_pids(deployment), console)


def _peers_turn(server: Server, console: Console, plan: Plan) -> list[LevelSummary]:
    server.signal(signal.SIGCONT)
    try:
        console.print(f"{server.name}:", highlight=False)
        target = Target.parse(server.url, None)
        return measure(target, served_model(server.url, None), plan, [], console)
    finally:
        server.signal(signal.SIGSTOP)


def _median(name: str, turns: Sequence[LevelSummary]) -> Served:
    def middle(pick: Callable[[LevelSummary], float | None]) -> float | None:
        values = [value for turn in turns if (value := pick(turn)) is not None]
        return statistics.median(values) if values else None

    def point(
        pick: Callable[[LevelSummary], Spread | None], which: Literal["p50", "p99"]
    ) -> float | None:
        return middle(lambda level: getattr(pick(level), which, None))

    return Served(
        server=name,
        concurrency=turns[0].concurrency,
        output_rate=middle(lambda level: level.output_rate),
        ttft_p50=point(lambda level: level.ttft, "p50"),
        ttft_p99=point(lambda level: level.ttft, "p99"),
        tpot_p50=point(lambda level: level.tpot, "p50"),
        itl_p50=point(lambda level: level.itl, "p50"),
        itl_p99=point(lambda level: level.itl, "p99"),
        failed=sum(level.failed for level in turns),
    )


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or not theirs else ours / theirs
