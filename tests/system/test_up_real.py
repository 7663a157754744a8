"""The ``diptych`` command on the real model: what the README promises, as the README says it."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from tools.bench.report import Report

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 120.0

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


class Deployment:
    """``diptych up`` of the default deployment on a port and in a run directory of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.folder = folder
        self.address = f"127.0.0.1:{port}"
        self.config = folder / "local.yaml"
        text = (ROOT / "configs" / "local.yaml").read_text()
        text = text.replace("127.0.0.1:8000", self.address)
        self.config.write_text(re.sub(r"kv_memory: \w+", "kv_memory: 128MiB", text))
        self.env = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "COLUMNS": "200"}
        self.run_dir = folder / f"diptych-{os.getuid()}" / "local"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools", "up", str(self.config)],
            cwd=folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.introduction = ""

    def wait(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.introduction += line
            if "stop: Ctrl-C" in line:
                return
        raise AssertionError(self.introduction)

    def diptych(self, *arguments: str, stdin: str = "") -> str:
        return self.run([sys.executable, "-m", "tools", *arguments], stdin)

    def run(self, command: list[str], stdin: str = "") -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.env,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def pid(self, name: str) -> int:
        return int(json.loads((self.run_dir / f"{name}.ready").read_text())["pid"])


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    folder = Path(tempfile.mkdtemp(prefix="dt-"))
    running = Deployment(folder)
    family: list[psutil.Process] = []
    try:
        running.wait()
        yield running
        family = psutil.Process(running.process.pid).children(recursive=True)
    finally:
        running.process.send_signal(signal.SIGINT)
        rest, _ = running.process.communicate(timeout=DEADLINE)
        psutil.wait_procs(family, timeout=DEADLINE)
        left = [process for process in family if process.is_running()]
        files = [path.name for path in running.run_dir.iterdir()]
        shutil.rmtree(folder)
    assert (running.process.returncode, left, files) == (0, [], ["logs"]), rest


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@needs_curl
def test_the_shown_curl_answers(deployment: Deployment) -> None:
    """Guards: the first command a user copies works as printed."""
    text = deployment.introduction
    command = text[text.index("curl ") : text.index("logs:")]
    answer = json.loads(deployment.run(["bash", "-c", command]))
    assert "Paris" in answer["choices"][0]["message"]["content"]


@needs_curl
@pytest.mark.parametrize("document", ["README.md", "docs/api.md"])
def test_every_curl_of_the_documents_answers(deployment: Deployment, document: str) -> None:
    commands = [block for block in blocks(document, "sh") if block.startswith("curl")]
    assert commands
    for command in commands:
        command = command.replace("127.0.0.1:8000", deployment.address)
        answer = json.loads(deployment.run(["bash", "-c", f"{command.rstrip()} -s"]))
        assert answer["choices"], answer


def test_every_python_block_of_the_readme_runs(deployment: Deployment) -> None:
    snippets = blocks("README.md", "python")
    assert len(snippets) == 2
    for snippet in snippets:
        code = snippet.replace("127.0.0.1:8000", deployment.address)
        assert deployment.run([sys.executable, "-c", code]).strip()


def test_status_shows_every_service(deployment: Deployment) -> None:
    text = deployment.diptych("status")
    for name in ("prefill-0", "decode-0", "router", "gateway"):
        assert re.search(rf"{name} .* ready ", text), text


def test_chat_answers_and_shows_its_speed(deployment: Deployment) -> None:
    text = deployment.diptych(
        "chat", "--temperature", "0", "--max-tokens", "12", stdin="Hi\n/quit\n"
    )
    assert re.search(r"\d+ tokens, TTFT \d+ ms, TPOT [\d.]+ ms", text), text


def test_bench_measures_phases_and_hand_over(deployment: Deployment) -> None:
    """Guards: the report has every promised number, of split requests."""
    out = deployment.folder / "report"
    text = deployment.diptych(
        *("bench", "serve", "--input", "120", "--output", "8", "--concurrency", "1,2"),
        *("--requests", "3", "--out", str(out)),
    )
    assert "hand-over" in text
    report = msgspec.json.decode(out.with_suffix(".json").read_bytes(), type=Report)
    for level in report.levels:
        assert (level.requests, level.failed, level.output_tokens) == (3, 0, 24)
        assert level.split_share == 1.0
        phases = level.phases
        assert level.ttft and level.tpot and level.itl and phases.queue and phases.prefill
        assert phases.hand_over and phases.decode_step and level.control_cpu_us
    assert "<svg" in out.with_suffix(".html").read_text()


def test_a_drained_worker_serves_again_when_told(deployment: Deployment) -> None:
    assert "decode-0 is drained" in deployment.diptych("drain", "decode-0")
    assert "drained" in deployment.diptych("status")
    assert "decode-0 serves as decode" in deployment.diptych("role", "decode-0", "decode")


def test_restart_brings_back_one_service_and_leaves_the_rest(deployment: Deployment) -> None:
    before = {name: deployment.pid(name) for name in ("prefill-0", "decode-0", "router")}
    assert "decode-0 is ready again" in deployment.diptych("restart", "decode-0")
    after = {name: deployment.pid(name) for name in before}
    assert after["decode-0"] != before["decode-0"]
    assert (after["prefill-0"], after["router"]) == (before["prefill-0"], before["router"])
    assert deployment.diptych("chat", "--max-tokens", "4", stdin="Hi\n").count("TTFT") == 1


def test_doctor_knows_that_it_runs(deployment: Deployment) -> None:
    text = deployment.diptych("doctor", str(deployment.config))
    assert f"runs as pid {deployment.process.pid}" in text
    assert "fail" not in text
