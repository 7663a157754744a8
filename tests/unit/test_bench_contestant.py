"""Measured engines are processes: answers, errors, endings, and silence while others run."""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console

from shared.errors import ResourceMissing
from tools.bench.engine.contestant import Contestant, EngineFailed, Launch
from tools.bench.engine.figures import Plan, Shape
from tools.bench.engine.rounds import Entry, Race

MODULE = """
import os, sys, threading, time

def load(options):
    print("the engine says hello")
    if options.get("broken"):
        raise ValueError("no weights here")
    calls = []

    def decode(batch, context, steps):
        calls.append((batch, context))
        if options.get("fails_at") == len(calls):
            os._exit(3)
        return [options["seconds"]] * steps

    def spin():
        def forever():
            while True:
                pass
        threading.Thread(target=forever, daemon=True).start()

    def refuse():
        raise ValueError("not like this")

    return {"decode": decode, "prefill": lambda tokens: options["seconds"], "spin": spin,
            "refuse": refuse, "sleep": lambda seconds: time.sleep(seconds)}
"""
SHAPES = (Shape("decode", 4, 100), Shape("prefill", 1, 64))
PLAN = Plan(model="m", shapes=SHAPES, rounds=2, steps=3, cores=(0,))


@pytest.fixture
def module(tmp_path: Path) -> str:
    (tmp_path / "stand_in_engine.py").write_text(MODULE)
    return str(tmp_path)


def launch(folder: str, name: str = "x", **options: object) -> Launch:
    cores = sorted(psutil.Process().cpu_affinity())[:1]
    return Launch(
        name=name,
        python=sys.executable,
        module="stand_in_engine",
        options={"cores": cores, "seconds": 0.01, **options},
        environment={"PYTHONPATH": folder},
    )


@pytest.fixture
def contestant(module: str, tmp_path: Path) -> Iterator[Contestant]:
    with Contestant(launch(module), tmp_path / "log", 60.0) as one:
        yield one


def test_values_come_back_and_prints_do_not_disturb(contestant: Contestant) -> None:
    """Guards: an engine that prints to stdout breaks the protocol."""
    assert contestant.ask("decode", 30.0, batch=2, context=5, steps=3) == [0.01] * 3
    assert contestant.rss > 1 << 20 and contestant.load_seconds >= 0


def test_an_error_is_reported_and_the_next_question_answered(contestant: Contestant) -> None:
    with pytest.raises(EngineFailed, match="not like this"):
        contestant.ask("refuse", 30.0)
    with pytest.raises(EngineFailed, match="KeyError"):
        contestant.ask("nothing", 30.0)
    assert contestant.ask("prefill", 30.0, tokens=3) == 0.01


def test_silence_ends_at_the_deadline(
    contestant: Contestant, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineFailed, match="in time"):
        contestant.ask("sleep", 0.2, seconds=60)
    monkeypatch.setattr("tools.bench.engine.contestant._CLOSE_TIMEOUT", 0.5)
    contestant.close()  # it is asleep, and has to be killed


def test_no_cpu_is_used_out_of_turn(contestant: Contestant) -> None:
    """Guards: an engine whose threads spin while it waits slows all the others down."""
    contestant.ask("spin", 30.0)
    process = psutil.Process(contestant.pid)
    deadline = time.monotonic() + 10
    while process.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.01)
    before = process.cpu_times()
    time.sleep(0.2)
    assert process.cpu_times() == before


def test_a_load_that_fails_tells_the_last_words(module: str, tmp_path: Path) -> None:
    with (
        pytest.raises(EngineFailed, match="no weights here"),
        Contestant(launch(module, broken=True), tmp_path / "log", 60.0),
    ):
        pass


def test_no_interpreter(module: str, tmp_path: Path) -> None:
    absent = Launch(name="x", python="/no/python", module="m", options={})
    with pytest.raises(ResourceMissing, match="/no/python"), Contestant(absent, tmp_path / "l", 1):
        pass


def test_one_that_dies_drops_out_and_the_others_go_on(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: half an hour of measurement is lost to one peer's crash."""
    monkeypatch.setattr(tempfile, "tempdir", module)
    entries = [
        Entry(launch=launch(module, "good", seconds=0.02), precision="bf16", ours=False),
        Entry(launch=launch(module, "dies", fails_at=2), precision="bf16", ours=False),
        Entry(launch=launch(module, "broken", broken=True), precision="bf16", ours=False),
    ]
    facts, cells = Race(PLAN, Console(quiet=True)).run(entries)
    assert [bool(one.problem) for one in facts] == [False, True, True]
    good = [cell for cell in cells if cell.engine == "good"]
    assert [(cell.shape, cell.turns) for cell in good] == [(shape, 2) for shape in SHAPES]
    assert good[0].median == pytest.approx(20.0)
    assert facts[0].rss is not None and json.dumps(facts[0].load_seconds)


def test_each_round_begins_with_another_engine(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: one engine that always follows the heaviest one and meets its heat."""
    turns: list[tuple[str, Shape]] = []
    monkeypatch.setattr(Race, "_turn", lambda _, name, shape: turns.append((name, shape)))
    entries = [
        Entry(launch=launch(module, name, seconds=0.0), precision="bf16", ours=False)
        for name in "abc"
    ]
    plan = msgspec.structs.replace(PLAN, rounds=4)
    Race(plan, Console(quiet=True))._measure(entries, lambda _: None)
    rounds = ["abc", "bca", "cab", "abc"]
    assert turns == [(name, shape) for shape in SHAPES for names in rounds for name in names]
