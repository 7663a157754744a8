"""``diptych up`` from start to the last file removed, with stand-ins for the real services."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

STAND_INS = Path(__file__).parent / "stand_ins"
DEADLINE = 30.0


class Up:
    """A running ``diptych up`` and what belongs to it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port
        self.root = folder / "run"
        self.config = folder / "test.yaml"
        self.config.write_text(
            "name: test\n"
            "deployment_type: split\n"
            f"model: {{path: {folder / 'model'}}}\n"
            "workers:\n"
            "  prefill: {kv_memory: 1MiB}\n"
            "  decode: {kv_memory: 1MiB}\n"
            f"router: {{drain_timeout: 3s}}\n"
            f"gateway: {{http: '127.0.0.1:{port}'}}\n"
            f"runtime_dir: {self.root}\n"
        )
        self.process: subprocess.Popen[str] | None = None
        self.lines: list[str] = []

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tools", "up", str(self.config)]

    def start(self) -> "subprocess.Popen[str]":
        self.process = subprocess.Popen(
            self.command(),
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(STAND_INS), "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self.process

    def read_until(self, word: str) -> str:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if word in line:
                return line
        raise AssertionError(f"{word!r} did not come:\n{''.join(self.lines)}")

    def finish(self) -> tuple[int, str]:
        assert self.process is not None
        rest, _ = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, "".join(self.lines) + rest

    def pids(self) -> dict[str, int]:
        """Return who is ready now; a file may go between being found and being read."""
        found = {}
        for path in self.root.glob("*.ready"):
            with contextlib.suppress(FileNotFoundError):
                found[path.stem] = int(json.loads(path.read_text())["pid"])
        return found

    def family(self) -> list[psutil.Process]:
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def leftovers(self) -> list[str]:
        return sorted(p.name for p in self.root.iterdir() if p.name != "logs")


def wait_until(condition: object, what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE)
    assert not alive


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Up]:
    folder = Path(tempfile.mkdtemp(prefix="dt-"))
    make_model(folder / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = Up(folder, port)
    try:
        yield run
    finally:
        if run.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in run.family():
                    child.kill()
            if run.process.poll() is None:
                run.process.kill()
            run.process.communicate(timeout=DEADLINE)
        shutil.rmtree(folder)


def make_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    (folder / "model.safetensors").write_bytes(data)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_prints_each_service_and_a_curl_that_works(up: Up) -> None:
    """Guards: the shown command is one that was tried, and every service gets its line."""
    up.start()
    up.read_until("Ctrl-C")
    text = "".join(up.lines)
    for name in ("prefill-0", "decode-0", "router", "gateway"):
        assert f"  {name} " in text
    command = text[text.index("curl ") : text.index("logs:")]
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=DEADLINE
    )
    assert "choices" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_in_order_and_leaves_only_logs(up: Up, number: signal.Signals) -> None:
    """Guards: gateway drains before router, router before workers; no file, no process stays."""
    process = up.start()
    up.read_until("Ctrl-C")
    family = up.family()
    process.send_signal(number)
    code, _ = up.finish()
    assert code == 0
    gone(family)
    assert up.leftovers() == []
    order = (up.root / "logs" / "order").read_text().split()
    assert order[:2] == ["gateway", "router"]
    assert sorted(order[2:]) == ["decode-0", "prefill-0"]


@pytest.mark.faults
@pytest.mark.parametrize("victims", ["up", "supervisor", "both", "during start"])
def test_kill_9_leaves_no_orphan(up: Up, victims: str) -> None:
    """Guards: whichever parent dies without a word, every process ends by itself."""
    process = up.start()
    if victims == "during start":
        up.read_until("diptych")
        wait_until(lambda: len(up.family()) >= 3, "services start")
    else:
        up.read_until("Ctrl-C")
    family = up.family()
    supervisor = psutil.Process(process.pid).children()[0]
    if victims in ("up", "both", "during start"):
        process.kill()
    if victims in ("supervisor", "both"):
        supervisor.kill()
    code, text = up.finish()
    gone(family)
    if victims == "supervisor":
        assert code == 1
        assert "the supervisor ended" in text
    if victims != "both":
        assert up.leftovers() == []
    assert not [name for name in up.leftovers() if name.endswith(".ready")]


@pytest.mark.faults
def test_starts_again_after_everything_was_killed(up: Up) -> None:
    """Guards: stale sockets, ready files and locks of a killed run do not block the next."""
    process = up.start()
    up.read_until("Ctrl-C")
    family = up.family()
    for victim in [psutil.Process(process.pid), *family]:
        victim.kill()
    up.finish()
    gone(family)
    assert up.leftovers() != []
    up.lines = []
    process = up.start()
    up.read_until("Ctrl-C")
    process.send_signal(signal.SIGINT)
    code, _ = up.finish()
    assert code == 0
    assert up.leftovers() == []


def test_a_second_up_is_refused_by_name(up: Up) -> None:
    """Guards: two runs never fight over one run directory."""
    process = up.start()
    up.read_until("Ctrl-C")
    second = subprocess.run(
        up.command(), cwd=up.folder, capture_output=True, text=True, check=False, timeout=DEADLINE
    )
    assert second.returncode == 2
    assert f"deployment `test` is already run by pid {process.pid}" in second.stderr
    assert second.stderr.count("\n") == 1
    process.send_signal(signal.SIGINT)
    assert up.finish()[0] == 0


def test_a_dead_service_is_started_again_and_said(up: Up) -> None:
    """Guards: a crash is repaired without the user, and never silent."""
    process = up.start()
    up.read_until("Ctrl-C")
    os.kill(up.pids()["decode-0"], signal.SIGKILL)
    up.read_until("decode-0 (pid")
    assert "ready again" in up.read_until("decode-0")
    process.send_signal(signal.SIGINT)
    assert up.finish()[0] == 0


def test_a_supervisor_that_is_not_heard_is_no_reason_to_stop(up: Up) -> None:
    """A cleaner of temporary folders, or a stalled machine, would end every service."""
    up.start()
    up.read_until("Ctrl-C")
    pids = up.pids()
    (up.root / "supervisor.sock").unlink()
    assert "run on" in up.read_until("warning:")
    os.kill(pids["prefill-0"], signal.SIGKILL)
    wait_until(lambda: up.pids().get("prefill-0") != pids["prefill-0"], "not started again")
    wait_until(lambda: "prefill-0" in up.pids(), "not ready again")
    assert up.process is not None
    up.process.send_signal(signal.SIGINT)
    code, text = up.finish()
    assert code == 0
    assert text.count("warning:") == 1
    assert up.leftovers() == []


@pytest.mark.parametrize("name", ["prefill-0", "gateway"])
def test_a_refusing_service_stops_everything_with_its_sentence(up: Up, name: str) -> None:
    """Guards: a config error of one process is not retried for ever."""
    (up.folder / "behaviour.json").write_text(json.dumps({name: "refuse"}))
    up.start()
    code, text = up.finish()
    assert code == 2
    assert f"error: {name}: `model.path` is not a model" in text
    assert up.leftovers() == []


def test_a_crashing_service_shows_the_end_of_its_log(up: Up) -> None:
    """Guards: the user sees why, without looking for files."""
    (up.folder / "behaviour.json").write_text(json.dumps({"router": "crash"}))
    up.start()
    code, text = up.finish()
    assert code == 1
    assert "RuntimeError: boom" in text
    assert up.leftovers() == []


def test_a_second_ctrl_c_kills_what_does_not_stop(up: Up) -> None:
    """Guards: an impatient user gets the terminal back."""
    (up.folder / "behaviour.json").write_text(json.dumps({"decode-0": "ignore-sigterm"}))
    process = up.start()
    up.read_until("Ctrl-C")
    family = up.family()
    process.send_signal(signal.SIGINT)
    up.read_until("stopping")
    wait_until(lambda: set(up.pids()) <= {"decode-0"}, "the others stop")
    process.send_signal(signal.SIGINT)
    code, _ = up.finish()
    assert code == 0
    gone(family)
    assert up.leftovers() == []


def test_a_port_in_use_is_one_sentence_and_nothing_starts(up: Up) -> None:
    """Guards: no half-started deployment."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", up.port))
        taken.listen()
        up.start()
        code, text = up.finish()
    assert code == 2
    assert text.startswith(f"error: 127.0.0.1:{up.port} cannot be opened")
    assert text.count("\n") == 1
    assert up.leftovers() == []


def test_a_service_started_by_hand_is_not_run_over(up: Up) -> None:
    """Guards: `up` must not remove the sockets of a service that somebody else runs."""
    (up.root / "logs").mkdir(parents=True)
    by_hand = subprocess.Popen(
        [sys.executable, "-m", "services.router", "--config", str(up.config), "--name", "router"],
        cwd=up.folder,
        env={**os.environ, "PYTHONPATH": str(STAND_INS)},
    )
    try:
        wait_until(up.root.joinpath("router.ready").exists, "router starts")
        up.start()
        code, text = up.finish()
        assert code == 2
        assert f"already runs by itself (pid {by_hand.pid})" in text
        assert up.root.joinpath("router.sock").exists()
    finally:
        by_hand.terminate()
        by_hand.wait(DEADLINE)
