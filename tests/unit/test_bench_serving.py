"""``bench compare --serving`` over servers that answer at once: turns, figures, report."""

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from shared.config import Deployment, ModelSection
from shared.errors import BadConfig, ResourceMissing
from tools.bench.compare import serving
from tools.bench.compare.server import Server
from tools.bench.compare.server import serving as started_peer
from tools.bench.peers.peer import PEERS, Peer
from tools.bench.serve import Plan
from tools.bench.sse_client import Target
from tools.bench.summary import LevelSummary

PLAN = Plan(input_words=5, output_tokens=4, levels=(1, 2), requests=2, seed=7, timeout=20.0)
QUIET = Console(quiet=True)


def fake_peer(name: str, *arguments: str) -> Peer:
    server = ("tests.unit.fake_openai_server", *(arguments or ("{port}",)))
    return msgspec.structs.replace(PEERS["transformers"], name=name, server=server)


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the servers' logs lie."""
    folder = tmp_path / "logs"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(32)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def deployment(model: Path) -> Deployment:
    return Deployment(name="d", deployment_type="split", model=ModelSection(path=str(model)))


@pytest.fixture
def ours(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A fake server in the place of our deployment."""
    cores = tuple(os.sched_getaffinity(0))
    with started_peer(fake_peer("ours"), str(model), cores) as server:
        monkeypatch.setattr(serving, "started", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(serving, "gateway_url", lambda _: server.url)
        monkeypatch.setattr(serving, "control_pids", lambda _: [])
        yield server


def state(server: Server) -> str:
    return Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.timeout(120)
@pytest.mark.keeps("fds")  # matplotlib's fonts
def test_servers_take_turns_and_the_report_says_what_follows(
    deployment: Deployment, ours: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: whoever comes second always meets the first one's heat, prompts that a peer has
    cached from the round before, and a report that leaves ratios to its reader."""
    turns: list[tuple[int, int]] = []
    measure = serving.measure

    def noted(target: Target, model: str, plan: Plan, *rest: Any) -> list[LevelSummary]:
        turns.append((target.port, plan.seed))
        return measure(target, model, plan, *rest)

    monkeypatch.setattr(serving, "measure", noted)
    peers = [fake_peer("vllm-cpu-bf16"), fake_peer("llama.cpp")]
    out = tmp_path / "report"
    code = serving.compare_serving(deployment, Path("d.yaml"), peers, PLAN, 3, out, QUIET)
    assert code == 0
    port = Target.parse(ours.url, None).port
    first, second = [p for p, _ in turns if p != port][:2]
    assert [p for p, _ in turns] == [
        *(port, first, second),
        *(first, second, port),
        *(second, port, first),
    ]
    assert len({seed for _, seed in turns}) == 3
    report = json.loads((tmp_path / "report.json").read_text())
    servers = ["diptych"] * 2 + ["vllm-cpu-bf16"] * 2 + ["llama.cpp"] * 2
    assert [one["server"] for one in report["served"]] == servers
    assert [one["concurrency"] for one in report["served"]] == [1, 2] * 3
    assert all(one["failed"] == 0 and one["output_rate"] > 0 for one in report["served"])
    assert [one["server"] for one in report["ratios"]] == servers
    own, theirs = report["served"][1], report["served"][5]
    ratio = report["ratios"][5]["output_rate"]
    assert ratio == pytest.approx(own["output_rate"] / theirs["output_rate"])
    assert report["verdicts"] == [], "goals are those of 16 clients"
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_a_peer_stands_still_out_of_its_turn_and_ends_with_the_run(model: Path) -> None:
    """Guards: spinning threads of one server in the figures of another."""
    cores = tuple(os.sched_getaffinity(0))
    with started_peer(fake_peer("x"), str(model), cores) as server:
        server.signal(signal.SIGSTOP)
        _until(server, "T")
        levels = serving._peers_turn(server, QUIET, PLAN)
        assert [level.failed for level in levels] == [0, 0]
        _until(server, "T")
    assert server.process.poll() is not None


def _until(server: Server, wanted: str) -> None:
    """A stop signal takes effect a moment after it is sent."""
    while state(server) != wanted:
        os.sched_yield()


def test_a_peer_that_does_not_start_speaks_its_last_words(model: Path) -> None:
    """Guards: 15 minutes of waiting for a process that is gone."""
    broken = fake_peer("broken", "broken")
    with (
        pytest.raises(ResourceMissing, match=r"broken does not serve: no such model \(log: "),
        started_peer(broken, str(model), tuple(os.sched_getaffinity(0))),
    ):
        pass


def test_the_log_of_a_peer_that_served_goes(model: Path, logs: Path) -> None:
    """Guards a folder left in /tmp by each server of each comparison."""
    with started_peer(fake_peer("good"), str(model), tuple(os.sched_getaffinity(0))):
        assert len(list(logs.iterdir())) == 1
    assert not list(logs.iterdir())


def test_a_peer_without_a_server_is_refused_before_anything_starts(
    deployment: Deployment, tmp_path: Path
) -> None:
    peers = [PEERS["transformers"]]
    with pytest.raises(BadConfig, match="transformers is measured without a server only"):
        serving.compare_serving(deployment, Path("d"), peers, PLAN, 1, tmp_path / "r", QUIET)


def test_goals_are_judged_at_sixteen_clients_by_the_better_vllm() -> None:
    """Guards: a goal met beside the slower one, and a ratio that is upside down."""

    def served(server: str, rate: float, itl: float, clients: int = 16) -> serving.Served:
        return serving.Served(
            server=server,
            concurrency=clients,
            output_rate=rate,
            ttft_p50=100.0,
            ttft_p99=None,
            tpot_p50=None,
            itl_p50=None,
            itl_p99=itl,
            failed=0,
        )

    found = [
        served("diptych", 300.0, 30.0),
        served("vllm-cpu-bf16", 100.0, 10.0),
        served("vllm-cpu-w8a8", 250.0, 100.0),
        served("vllm-cpu-w8a8", 900.0, 1.0, clients=1),
    ]
    rate, itl, ttft = serving.served_verdicts(found)
    assert {rate.peer, itl.peer, ttft.peer} == {"vllm-cpu-w8a8"}
    assert (rate.ratio, rate.met) == (pytest.approx(250 / 300), False)
    assert (itl.ratio, itl.met) == (pytest.approx(0.3), False)
    assert (ttft.ratio, ttft.met) == (1.0, True)
    assert serving.served_verdicts(found[1:]) == []
