"""``diptych status``: services, roles, queues, KV use and rates as a table.

``KV`` is the share of blocks that requests hold, ``cached`` that of reusable ones; ``in/s``,
``hits/s`` and ``out/s`` are tokens per second: computed prompt, reused prompt, output.
"""

import time

import msgspec
from msgspec import Struct
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

import diptych
from shared.config import Deployment
from shared.errors import ResourceMissing
from shared.messages.fleet import FleetStatus, PairStatus, RouterCounters, WorkerStatus
from shared.messages.hello import WIRE_VERSION
from tools.running import client, is_supervised, require_gateway
from tools.supervise.control import Control, ProcessState
from tools.supervise.plan import Process, RunPaths, processes, run_paths

_SAMPLE = 1.0
_QUERY_TIMEOUT = 5.0
_COLOURS = {"ready": "green", "draining": "yellow", "hung": "red", "lost": "red"}


class Snapshot(Struct, frozen=True, kw_only=True):
    """Everything known at one moment.

    ``fleet`` is None while no gateway answers, ``states`` where no ``diptych up`` runs: services
    were then started by hand, perhaps on other machines.
    """

    at: float
    states: dict[str, ProcessState] | None
    fleet: FleetStatus | None
    problem: str = ""


class Rates(Struct, frozen=True, kw_only=True):
    """Tokens per second of one worker since the snapshot before."""

    prompt: float
    cached: float
    output: float


def show_status(deployment: Deployment, console: Console, *, watch: bool) -> int:
    """Print the status once, or again every second until Ctrl-C. Returns the exit code.

    Raises:
        ResourceMissing: the deployment does not run.
    """
    require_gateway(deployment)
    with client(deployment, connect_timeout=_QUERY_TIMEOUT, operator=True) as link:
        before = take(deployment, link)
        time.sleep(_SAMPLE)
        now = take(deployment, link)
        if not watch:
            console.print(render(deployment, now, before))
            return 0 if now.fleet is not None else 1
        with Live(render(deployment, now, before), console=console, screen=False) as live:
            try:
                while True:
                    time.sleep(_SAMPLE)
                    before, now = now, take(deployment, link)
                    live.update(render(deployment, now, before))
            except KeyboardInterrupt:
                return 0


def take(deployment: Deployment, link: diptych.Client) -> Snapshot:
    """Ask supervisor and gateway."""
    fleet, problem = None, ""
    try:
        fleet = msgspec.convert(link.status(timeout=_QUERY_TIMEOUT), FleetStatus)
    except diptych.DiptychError as error:
        problem = str(error)
    states: dict[str, ProcessState] | None = None
    if is_supervised(deployment):
        try:
            states = Control(run_paths(deployment).socket).states()
        except ResourceMissing as error:
            states, problem = {}, error.message
    return Snapshot(at=time.monotonic(), states=states, fleet=fleet, problem=problem)


def rates(now: WorkerStatus, before: WorkerStatus | None, seconds: float) -> Rates | None:
    """Return what a worker did between two snapshots; None after a restart."""
    if before is None or before.incarnation != now.incarnation or seconds <= 0:
        return None
    return Rates(
        prompt=(now.counters.prompt_tokens - before.counters.prompt_tokens) / seconds,
        cached=(now.counters.cached_tokens - before.counters.cached_tokens) / seconds,
        output=(now.counters.output_tokens - before.counters.output_tokens) / seconds,
    )


def render(deployment: Deployment, now: Snapshot, before: Snapshot) -> RenderableType:
    """Return the whole screen."""
    parts: list[RenderableType] = [_headline(deployment, now)]
    parts.append(_services(deployment, now, before, run_paths(deployment)))
    if now.fleet is not None:
        parts.append(_requests(now.fleet.counters))
        parts += _other_version(now.fleet)
        parts += [_pair_line(worker, pair) for worker in now.fleet.workers for pair in worker.pairs]
    if now.problem:
        parts.append(f"[red]{escape(now.problem)}[/red]")
    return Group(*parts)


def _requests(counters: RouterCounters) -> str:
    """Name what never happened only where its absence says something."""
    seldom = ("failed", "cancelled", "rejected", "retries")
    counts = [f"{counters.accepted} accepted", f"{counters.finished} finished"]
    counts += [f"{count} {name}" for name in seldom if (count := getattr(counters, name))]
    return f"requests: {', '.join(counts)}"


def _other_version(fleet: FleetStatus) -> list[str]:
    """Say that peers of another release try to join: no other line has them."""
    last = fleet.other_version
    if last is None:
        return []
    count = fleet.counters.other_versions
    return [
        f"[yellow]refused {count} times: peers of another release, the last one "
        f"{escape(last.peer)} with wire version {last.wire_version}, not {WIRE_VERSION}[/yellow]"
    ]


def _pair_line(worker: WorkerStatus, pair: PairStatus) -> str:
    colour = "yellow" if pair.reason in ("cannot_map", "no_peer_access") else "dim"
    path = "no path yet" if pair.path is None else f"{pair.path} ({pair.reason})"
    if pair.problem is not None:
        colour, path = "yellow", f"no path: {escape(pair.problem)}"
    if pair.former:
        path = "before a path was found" if pair.path is None else f"{path}, no longer"
    text = (
        f"KV {pair.source} to {worker.worker}: {path}, {pair.transfers} hand-overs, "
        f"{pair.failed} failed, {pair.bytes / 1e6:.1f} MB"
    )
    if pair.codec not in (None, "none"):
        text += f", {pair.wire_bytes / 1e6:.1f} MB as {pair.codec}"
    if pair.pipeline_reason is not None:
        text += f", {_pipelining(pair)}"
    if pair.chunks_again:
        text += f", {pair.chunks_again} chunks asked for again"
    return f"[{colour}]{text}[/{colour}]"


def _pipelining(pair: PairStatus) -> str:
    """Say how many were pipelined, why, and what either way let requests wait for."""
    text = f"{pair.pipelined} pipelined ({pair.pipeline_reason}"
    others = pair.transfers - pair.pipelined
    if pair.pipelined and others:
        seconds = pair.pipelined_visible_seconds
        rest = (pair.visible_seconds - seconds) / others
        text += f": {1e3 * seconds / pair.pipelined:.1f} ms, others {1e3 * rest:.1f}"
    return f"{text})"


def _headline(deployment: Deployment, now: Snapshot) -> str:
    text = f"[bold]{deployment.name}[/bold] {deployment.deployment_type}"
    if now.fleet is None:
        return f"{text}, the fleet's status is not known"
    state = "draining" if now.fleet.draining else f"up {now.fleet.uptime:.0f} s"
    return f"{text}, {state}, {now.fleet.open_requests} open, {now.fleet.queued} queued"


def _services(
    deployment: Deployment, now: Snapshot, before: Snapshot, paths: RunPaths
) -> RenderableType:
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in ("service", "role", "health", "pid"):
        table.add_column(name, no_wrap=True)
    for name in ("wait", "run", "KV", "cached", "in/s", "hits/s", "out/s"):
        table.add_column(name, justify="right", no_wrap=True)
    workers = _by_name(now)
    earlier = _by_name(before)
    for process in processes(deployment):
        state = (now.states or {}).get(process.name)
        pid = str(state.pid) if state is not None and state.pid else "-"
        worker = workers.pop(process.name, None)
        if worker is not None:
            previous = earlier.get(process.name)
            pid = str(worker.pid) if now.states is None else pid
            table.add_row(*_worker_cells(worker, pid, rates(worker, previous, now.at - before.at)))
            continue
        health = _health(now, process, paths.ready(process.name).exists())
        table.add_row(process.name, process.role, health, pid)
    for name, worker in workers.items():
        previous = earlier.get(name)
        cells = _worker_cells(worker, str(worker.pid), rates(worker, previous, now.at - before.at))
        table.add_row(*cells)
    return table


def _health(now: Snapshot, process: Process, ready: bool) -> str:
    """Return the state of a service that the fleet's status does not name."""
    if now.states is None:
        if now.fleet is None:
            return "[yellow]unknown[/yellow]"
        answered = process.role in ("router", "gateway")
        return "[green]ready[/green]" if answered else "[red]absent[/red]"
    state = now.states.get(process.name)
    if state is None or not state.pid:
        return "[red]down[/red]"
    return "[green]ready[/green]" if ready else "[yellow]starting[/yellow]"


def _by_name(snapshot: Snapshot) -> dict[str, WorkerStatus]:
    fleet = snapshot.fleet
    return {} if fleet is None else {str(worker.worker): worker for worker in fleet.workers}


def _worker_cells(worker: WorkerStatus, pid: str, speed: Rates | None) -> list[str]:
    load = worker.load
    used = load.blocks_active + load.blocks_leased
    total = max(load.blocks_total, 1)
    running = load.running + load.receiving + load.held
    colour = _COLOURS[worker.health]
    return [
        worker.worker,
        worker.role,
        f"[{colour}]{'drained' if worker.drained else worker.health}[/{colour}]",
        pid,
        str(load.waiting),
        str(running),
        f"{100 * used / total:.0f} %",
        f"{100 * load.blocks_cached / total:.0f} %",
        "-" if speed is None else f"{speed.prompt:.0f}",
        "-" if speed is None else f"{speed.cached:.0f}",
        "-" if speed is None else f"{speed.output:.0f}",
    ]
