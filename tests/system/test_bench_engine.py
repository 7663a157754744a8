"""``diptych bench engine`` and ``compare`` on the real model, small."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SMALL = ("--batch", "1,2", "--context", "32,64", "--prefill", "48", "--rounds", "2")


def bench(*arguments: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools", "bench", *arguments, *SMALL, "--steps", "2"]
    done = subprocess.run(
        [*command, "--threads", "1", "--json", "--out", str(folder / "report")],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert json.loads((folder / "report.json").read_text()) == report
    page = (folder / "report.html").read_text()
    assert "<svg" in page and "<script" not in page
    return report


def test_engine_reports_every_shape_memory_and_growth(tmp_path: Path) -> None:
    """Guards: JSON on stdout is mixed with progress, or a figure is missing."""
    report = bench(
        *("engine", "--precision", "bf16", "--sampling", "greedy,mixed"), folder=tmp_path
    )
    shapes = [cell["shape"] for cell in report["cells"]]
    assert [shape["kind"] for shape in shapes].count("decode") == 6
    assert [shape["kind"] for shape in shapes].count("prefill") == 1
    host = [(s["batch"], s["sampling"]) for s in shapes if s["kind"] == "host"]
    assert sorted(host) == [(1, "greedy"), (1, "mixed"), (2, "greedy"), (2, "mixed")]
    assert all(cell["turns"] == 2 and cell["median"] > 0 for cell in report["cells"])
    (engine,) = report["engines"]
    assert engine["problem"] is None and engine["kv_token_bytes"] == 23_040
    assert engine["rss"] > 100 << 20 and engine["copy_rate"] > 0
    assert report["growth"][0]["engine"] == "diptych-bf16"


def test_compare_runs_a_peer_beside_us(tmp_path: Path) -> None:
    """transformers needs no installation: it is what Diptych itself has."""
    report = bench("compare", "--precision", "bf16", "--peers", "transformers", folder=tmp_path)
    assert [engine["name"] for engine in report["engines"]] == ["diptych-bf16", "transformers"]
    assert {cell["engine"] for cell in report["cells"]} == {"diptych-bf16", "transformers"}
    assert len(report["cells"]) == 8
    medians = {(cell["engine"], str(cell["shape"])): cell["median"] for cell in report["cells"]}
    assert len(report["ratios"]) == 4
    for found in report["ratios"]:
        assert (found["ours"], found["peer"]) == ("diptych-bf16", "transformers")
        ours, theirs = (medians[found[who], str(found["shape"])] for who in ("ours", "peer"))
        assert found["ratio"] == pytest.approx(ours / theirs)
    (growth,) = report["verdicts"]
    assert growth["peer"] == "memory copy"
    assert growth["met"] == (growth["ratio"] <= growth["bound"])
