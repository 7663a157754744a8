"""Losses of precisions: computed as defined, bounded by a table, read from our own text."""

import json
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
import numpy as np
import pytest
import typer
from msgspec import Struct
from rich.console import Console
from safetensors import SafetensorError
from typer.testing import CliRunner

from shared.errors import BadConfig
from shared.kv.layout import KvDtype
from shared.precision import Precision
from tools.bench.codecs_quality import BestTokens
from tools.bench.engine import command
from tools.bench.engine.contestant import EngineFailed
from tools.bench.engine.rounds import Entry
from tools.bench.options import with_options
from tools.bench.quality import measure as quality
from tools.bench.quality.command import breaches, quality_rows
from tools.bench.quality.gates import GATES, gate_for
from tools.bench.quality.measure import (
    TEXT,
    Loss,
    Plan,
    QualityRow,
    Scores,
    load_scores,
    loss,
    read_windows,
)


def scores(own: list[float], rows: list[list[float]]) -> Scores:
    """Scores over a vocabulary of as many tokens as a row of probabilities has."""
    table = np.array(rows)
    order = np.argsort(-table, axis=1)
    best = BestTokens(order, np.log(np.take_along_axis(table, order, axis=1)))
    return Scores(np.log(np.array(own)), best)


def row(lost: Loss) -> QualityRow:
    return QualityRow(
        precision="bf16",
        kv_dtype="bf16",
        rss=1 << 20,
        decode_ms=1.0,
        prefill_ms=1.0,
        prefill=lost,
        decode=lost,
    )


def test_loss_of_a_known_case() -> None:
    """Perplexity of p = 1/2 is 2, of p = 1/4 it is 4; one of two best tokens changed."""
    reference = scores([0.5, 0.5], [[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]])
    other = scores([0.25, 0.25], [[0.7, 0.2, 0.1], [0.3, 0.5, 0.2]])
    found = loss(reference, other)
    assert found.perplexity == pytest.approx(4.0)
    assert found.perplexity_change == pytest.approx(1.0)
    assert (found.positions, found.top1) == (2, 0.5)
    assert found.kl == pytest.approx((0.5 * np.log(5 / 3) + 0.3 * np.log(3 / 5)) / 2)


def test_the_same_reading_loses_nothing() -> None:
    same = scores([0.5], [[0.6, 0.3, 0.1]])
    found = loss(same, same)
    assert (found.perplexity_change, found.top1, found.kl) == (0.0, 1.0, 0.0)


def test_breaches_name_precision_phase_and_bound() -> None:
    """Guards: a precision that got worse passes since nobody looks at one of its numbers."""
    good = Loss(positions=9, perplexity=9.0, perplexity_change=0.0, top1=1.0, kl=0.0)
    bad = Loss(positions=9, perplexity=9.9, perplexity_change=0.5, top1=0.5, kl=1.0)
    assert breaches(row(good)) == []
    found = breaches(row(bad))
    assert len(found) == 6
    assert found[0].startswith("bf16, prefill: top-1 agreement 50.00%")
    assert len(quality_rows([row(good)])) == 3


def test_kv_in_int8_has_bounds_of_its_own() -> None:
    """Guards a loss of KV that passes for one of weights, or fails by their bounds."""
    some = Loss(positions=9, perplexity=9.0, perplexity_change=0.001, top1=0.98, kl=0.0008)
    assert breaches(row(some)) != []
    kept = msgspec.structs.replace(row(some), kv_dtype="int8")
    assert breaches(kept) == []
    worse = msgspec.structs.replace(some, kl=0.1)
    (found,) = breaches(msgspec.structs.replace(kept, decode=worse))
    assert found.startswith("bf16, KV int8, decode: KL")


@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize("kv_dtype", get_args(KvDtype))
def test_everything_that_can_be_served_has_bounds(precision: Precision, kv_dtype: KvDtype) -> None:
    """Guards: a combination that passes whatever it loses, as fp16 and int4 with int8 KV did."""
    gate = gate_for(precision, kv_dtype)
    coarse = "fp8" in (precision, kv_dtype)  # three bits of fraction, and on GPUs alone
    assert gate.perplexity <= (0.04 if coarse else 0.02)
    assert gate.top1 >= (0.88 if coarse else 0.96)
    awful = Loss(positions=9, perplexity=99.0, perplexity_change=9.0, top1=0.1, kl=3.0)
    measured = msgspec.structs.replace(row(awful), precision=precision, kv_dtype=kv_dtype)
    assert len(breaches(measured)) == 6


def test_coarse_kv_below_fine_weights_may_cost_what_such_weights_may() -> None:
    assert gate_for("fp32", "bf16") == GATES["bf16"]
    assert gate_for("int4", "bf16") == GATES["int4"]
    assert gate_for("fp16", "fp32") == GATES["fp16"]


def test_the_reference_has_the_tightest_bounds() -> None:
    assert all(gate.top1 <= GATES["fp32"].top1 for gate in GATES.values())
    assert all(gate.kl >= GATES["fp32"].kl for gate in GATES.values())


def test_scores_are_read_without_pickle(tmp_path: Path) -> None:
    harm = np.array([{"a": 1}], dtype=object)
    np.savez(tmp_path / "x.npz", logprobs=harm, tokens=harm, best=harm)
    with pytest.raises(SafetensorError):
        load_scores(tmp_path / "x.npz")


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose tokens are words."""
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr(quality, "resolve_model", lambda _: tmp_path)


def plan(text: Path | None, window: int, windows: int) -> Plan:
    return Plan(model="m", window=window, windows=windows, cores=(0,), text=text)


@pytest.mark.usefixtures("words")
def test_text_is_cut_into_whole_windows(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("a b c d e f g")
    assert [len(w) for w in read_windows(plan(tmp_path / "t", 3, 9))] == [3, 3]
    assert len(read_windows(plan(tmp_path / "t", 3, 1))) == 1
    with pytest.raises(BadConfig, match="7 tokens, fewer than a window of 8"):
        read_windows(plan(tmp_path / "t", 8, 1))
    with pytest.raises(BadConfig, match="cannot read"):
        read_windows(plan(tmp_path / "absent", 8, 1))


@pytest.mark.usefixtures("words")
def test_the_log_of_an_engine_that_failed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a sentence that names a log which the command has just removed."""

    def failing(_: object, entry: Entry, *rest: object) -> None:
        folder = rest[-1]
        assert isinstance(folder, Path)
        log = folder / f"{entry.launch.name}.log"
        log.write_text("why")
        raise EngineFailed(str(log))

    monkeypatch.setattr(quality, "_measure", failing)
    monkeypatch.setattr(quality.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(command, "resolve_model", lambda _: tmp_path)
    (tmp_path / "t").write_text("a b c d")
    with pytest.raises(EngineFailed) as failed:
        quality.measure(plan(tmp_path / "t", 3, 1), [], Console(quiet=True))
    assert Path(failed.value.message).read_text() == "why"


@pytest.mark.usefixtures("words")
def test_our_own_text_fills_the_default_windows() -> None:
    assert TEXT.is_file()
    assert len(read_windows(plan(None, 500, 7))) == 7


def test_options_of_a_struct_become_options_of_a_command() -> None:
    """Guards: inherited fields, defaults and exit codes get lost on the way to typer."""

    class Base(Struct, frozen=True, kw_only=True):
        count: Annotated[int, typer.Option(help="How many.", min=1)] = 3

    class Options(Base, frozen=True, kw_only=True):
        name: Annotated[str, typer.Option("--name")]

    seen: list[Options] = []

    @with_options(Options)
    def command(options: Options) -> int:
        seen.append(options)
        return options.count

    app = typer.Typer()
    app.command()(command)
    assert CliRunner().invoke(app, ["--name", "x"]).exit_code == 3
    assert CliRunner().invoke(app, ["--name", "y", "--count", "5"]).exit_code == 5
    assert CliRunner().invoke(app, []).exit_code == 2
    assert seen == [Options(name="x"), Options(name="y", count=5)]
