"""Engines in turns: all loaded, one running, every shape round after round."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shared.errors import DiptychError
from tools.bench.engine.contestant import Contestant, Launch
from tools.bench.engine.figures import Cell, EngineFacts, Plan, Shape, cell

_LOAD_TIMEOUT = 900.0
_TURN_TIMEOUT = 600.0


class Entry(Struct, frozen=True, kw_only=True):
    """An engine that takes part. ``ours``: it also answers what only Diptych knows."""

    launch: Launch
    precision: str
    ours: bool


class Race:
    """Measurement of several engines; one that fails drops out and the others go on.

    Args:
        plan: shapes, rounds and steps.
        console: shows progress.
    """

    def __init__(self, plan: Plan, console: Console) -> None:
        self._plan = plan
        self._console = console
        self._facts: dict[str, EngineFacts] = {}
        self._running: dict[str, Contestant] = {}
        self._turns: dict[tuple[str, Shape], list[list[float]]] = {}

    def run(self, entries: Sequence[Entry]) -> tuple[list[EngineFacts], list[Cell]]:
        """Load all, let them take turns, and return facts and figures in order of ``entries``.

        Logs of the engines stay only where one of them failed.
        """
        logs = Path(tempfile.mkdtemp(prefix="diptych-bench-"))
        total = len(entries) * (1 + len(self._plan.shapes) * self._plan.rounds)
        with contextlib.ExitStack() as stack, _bar(self._console) as progress:
            task = progress.add_task("loading", total=total)

            def done(doing: str) -> None:
                progress.update(task, advance=1, description=doing)

            for entry in entries:
                self._load(entry, logs / f"{entry.launch.name}.log", stack)
                done(f"loaded {entry.launch.name}")
            self._measure(entries, done)
            self._finish(entries)
        if not any(facts.problem for facts in self._facts.values()):
            shutil.rmtree(logs)
        cells = [cell(name, shape, turns) for (name, shape), turns in self._turns.items()]
        return [self._facts[entry.launch.name] for entry in entries], cells

    def _load(self, entry: Entry, log: Path, stack: contextlib.ExitStack) -> None:
        name = entry.launch.name
        try:
            contestant = stack.enter_context(Contestant(entry.launch, log, _LOAD_TIMEOUT))
            known = contestant.ask("facts", _TURN_TIMEOUT) if entry.ours else {}
        except DiptychError as error:
            self._facts[name] = EngineFacts(
                name=name, precision=entry.precision, problem=error.message
            )
            return
        self._running[name] = contestant
        self._facts[name] = EngineFacts(
            name=name,
            precision=entry.precision,
            load_seconds=contestant.load_seconds,
            loaded_rss=contestant.loaded_rss,
            **known,
        )

    def _measure(self, entries: Iterable[Entry], done: Callable[[str], None]) -> None:
        names = [entry.launch.name for entry in entries]
        for shape in self._plan.shapes:
            for round_number in range(self._plan.rounds):
                # Each round starts with another one: whoever follows a heavy one finds its heat.
                first = round_number % len(names)
                for name in names[first:] + names[:first]:
                    self._turn(name, shape)
                    done(f"{name}: {shape.label}")

    def _turn(self, name: str, shape: Shape) -> None:
        contestant = self._running.get(name)
        if contestant is None:
            return
        try:
            if shape.kind == "prefill":
                turn = [float(contestant.ask("prefill", _TURN_TIMEOUT, tokens=shape.tokens))]
            else:
                turn = contestant.ask(
                    shape.kind,
                    _TURN_TIMEOUT,
                    batch=shape.batch,
                    context=shape.tokens,
                    steps=self._plan.steps,
                    **_how(shape),
                )
        except DiptychError as error:
            self._drop(name, error)
        else:
            self._turns.setdefault((name, shape), []).append(turn)

    def _drop(self, name: str, error: DiptychError) -> None:
        self._running.pop(name).close()
        self._facts[name] = replace(self._facts[name], problem=error.message)
        self._console.print(f"{error.message}", style="red", markup=False)

    def _finish(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            name = entry.launch.name
            contestant = self._running.get(name)
            if contestant is None:
                continue
            self._facts[name] = replace(self._facts[name], rss=contestant.rss)
            if not entry.ours:
                continue
            try:
                rate = float(contestant.ask("copy_rate", _TURN_TIMEOUT))
            except DiptychError as error:
                self._drop(name, error)
            else:
                self._facts[name] = replace(self._facts[name], copy_rate=rate)


def _how(shape: Shape) -> dict[str, str]:
    """Return what only our engines are asked: peers decode greedily."""
    greedy = shape.kind == "decode" and shape.sampling == "greedy"
    return {} if greedy else {"sampling": shape.sampling}


def _bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console)
