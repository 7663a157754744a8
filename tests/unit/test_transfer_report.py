"""What ``diptych bench transfer`` reads and prints."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from shared.errors import BadConfig, ResourceMissing
from shared.kv.layout import KvLayout, LayerKv
from tools.bench import transfer_report
from tools.bench.page import write_files
from tools.bench.transfer_plan import TransferPlan, TransferRow, schedule
from tools.bench.transfer_report import (
    link_profile,
    parse_codecs,
    parse_lengths,
    run_bench,
    table_rows,
)
from tools.cli import app

LAYOUT = KvLayout(dtype="bf16", block_size=16, layers=(LayerKv(2, 16, 16),) * 4)


def plan() -> TransferPlan:
    return TransferPlan(
        layout=LAYOUT, lengths=(1024, 8192), prefill_rate=4000.0, codecs=("none", "int8")
    )


def row(tokens: int, path: str = "host", codec: str = "none") -> TransferRow:
    figures = dict.fromkeys(("seconds", "visible", "visible_off", "cpu_seconds"), 0.1234)
    rates = dict.fromkeys(("rate", "reference", "share", "overlap", "of_plain"), 0.75)
    sizes = {"tokens": tokens, "bytes": 123_456_789, "wire": 98_765_432}
    return msgspec.convert(
        {"path": path, "codec": codec} | sizes | figures | rates, type=TransferRow
    )


@pytest.mark.keeps("fds")  # matplotlib's fonts
def test_nothing_is_cut_where_no_terminal_says_its_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards tables in logs whose figures end in an ellipsis, and the page that help promises."""
    rows = [row(n, p, c) for n in (1024, 8192) for p, c in plan().movers]
    monkeypatch.setattr(transfer_report, "measure", lambda plan, note: rows)
    out = io.StringIO()
    assert run_bench(plan(), tmp_path / "deep" / "transfer", Console(file=out)) == 0
    text = out.getvalue()
    assert "…" not in text
    assert all(f"{name} " in text for name in ("8,192", "without pipeline", "75 % of 0.00"))
    page = (tmp_path / "deep" / "transfer.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 4
    assert "host int8" in page
    assert "98.8" in page
    saved = msgspec.json.decode((tmp_path / "deep" / "transfer.json").read_bytes())
    assert len(saved["rows"]) == 6
    assert saved["plan"]["codecs"] == ["none", "int8"]


def test_options_are_read_or_refused_by_name() -> None:
    """Guards a typing error that measures something else."""
    assert parse_lengths("128,2048") == (128, 2048)
    assert parse_codecs("int8") == ("none", "int8")
    assert parse_codecs("k4v4, none") == ("none", "k4v4")
    with pytest.raises(BadConfig, match="no codec 'zip'"):
        parse_codecs("none,zip")
    with pytest.raises(BadConfig, match="--tokens"):
        parse_lengths("128,x")
    assert link_profile(0, 0, 0) is None
    link = link_profile(10, 1, 30)
    assert link is not None
    assert (link.rate, link.delay, link.loss) == (1.25e9, 1e-3, 0.3)


@pytest.mark.parametrize(
    "wrong",
    [
        ("--prefill-rate", "0"),
        ("--prefill-rate", "nan"),
        ("--rate", "inf"),
        ("--rate", "1e-300"),
        ("--delay", "inf"),
        ("--delay", "1e8"),
        ("--chunk", "8193"),
        ("--slots", "99999999999"),
    ],
)
def test_a_figure_that_nothing_can_be_measured_with_is_refused(wrong: tuple[str, str]) -> None:
    """Guards tracebacks, rows of NaN, and a link that never carries anything."""
    done = CliRunner().invoke(app, ["bench", "transfer", "--tokens", "16", *wrong])
    assert done.exit_code == 2 or isinstance(done.exception, BadConfig), done.output
    assert wrong[0] in done.output + str(done.exception)


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    """Guards a traceback at the end of a long measurement."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResourceMissing, match="file/report"):
        write_files(row(16), "", tmp_path / "file" / "report")


def test_a_link_with_a_limit_has_a_column_and_others_have_none() -> None:
    """Guards a rate over a simulated link that nobody can hold against that link."""
    plain, limited = row(1024), msgspec.structs.replace(row(1024), of_link=0.895)
    assert "of the link" not in table_rows([plain])[0]
    header, with_it, without = table_rows([limited, plain])
    at = header.index("of the link")
    assert (header[at - 1], with_it[at], without[at]) == ("of reference", "90 %", "")
    assert len(header) == len(with_it) == len(without)


def test_a_link_leaves_the_path_of_one_host_out() -> None:
    """Guards shared memory measured under the name of a link."""
    assert plan().movers == (("ipc", "none"), ("host", "none"), ("host", "int8"))
    far = msgspec.structs.replace(plan(), link=link_profile(1, 0, 0))
    assert far.movers == (("host", "none"), ("host", "int8"))
    more = msgspec.structs.replace(plan(), sockets=3, nixl=True)
    assert more.movers[-2:] == (("host x3", "none"), ("nixl", "none"))
    assert ("nixl", "none") not in msgspec.structs.replace(far, nixl=True).movers


def test_a_paced_prefill_announces_each_block_and_layer_once() -> None:
    """Guards figures of KV that was moved twice, or not at all."""
    told = msgspec.structs.replace(plan(), notify_layers=3, chunk_tokens=512)
    spans = schedule(told, 1100, pipeline=True)
    cells = [
        (layer, block)
        for span in spans
        for layer in range(span.first_layer, span.end_layer)
        for block in range(span.first_block, span.end_block)
    ]
    assert len(cells) == len(set(cells)) == len(LAYOUT.layers) * told.blocks(1100)
    assert [span.at for span in spans] == sorted(span.at for span in spans)
    assert spans[-1].at == 1100 / told.prefill_rate
