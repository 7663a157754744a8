"""Start, kill, restart and stop the real services of one deployment, for tests."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from diptych import Client, DiptychError
from tests.nursery import ForkedService

REPO = Path(__file__).resolve().parents[2]


PATIENT = {"worker_timeout": "30s"}
"""Router settings where no worker may be taken for lost because the machine is busy."""


def free_port() -> int:
    """Return a loopback port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def deployment(roles: dict[str, int], **overrides: Any) -> dict[str, Any]:
    """Return an fp32 deployment tree: ``roles`` maps prefill/decode/mixed to a count."""
    sections = overrides.pop("workers", {})
    tree: dict[str, Any] = {
        "name": "t",
        "deployment_type": "colocated" if "mixed" in roles else "split",
        "model": {"path": "smollm2-135m-instruct", "max_model_len": 2048},
        "workers": {
            role: {"count": n, "precision": "fp32", "threads": 1, "kv_memory": "192MiB"}
            | sections.get(role, {})
            for role, n in roles.items()
        },
    }
    for key, value in overrides.items():
        tree[key] = value
    return tree


class Fleet:
    """One running deployment; every process can be killed and started again by name."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="dt"))
        tree = dict(tree)
        tree["runtime_dir"] = str(self.home / "run")
        self.port = free_port()
        tree["gateway"] = {"http": f"127.0.0.1:{self.port}"} | tree.get("gateway", {})
        self.tree = tree
        self.config = self.home / "deployment.yaml"
        self.config.write_text(yaml.safe_dump(tree))
        self.url = f"http://127.0.0.1:{self.port}"
        self.client_endpoint = f"ipc://{self.home}/run/client.sock"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._keeping = threading.Event()
        self._keeper: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def workers(self) -> list[str]:
        roles = ("mixed",) if "mixed" in self.tree["workers"] else ("prefill", "decode")
        return [f"{r}-{i}" for r in roles for i in range(self.tree["workers"][r]["count"])]

    @property
    def names(self) -> list[str]:
        return ["router", *self.workers, "gateway"]

    def start(self, timeout: float = 90.0) -> "Fleet":
        """Start everything and wait until every service is ready."""
        for name in self.names:
            self.spawn(name)
        self.wait_ready(self.names, timeout)
        return self

    def command(self, name: str) -> list[str]:
        """Return how one service is started."""
        kind = name.split("-")[0]
        module = {"mixed": "decode"}.get(kind, kind)
        return [
            *(sys.executable, "-m", f"services.{module}"),
            *("--config", str(self.config), "--name", name, "--die-with-parent"),
        ]

    def spawn(self, name: str) -> None:
        """Start one service, a worker of this host as a fork; its output goes to ``NAME.log``."""
        command = self.command(name)
        with (self.home / f"{name}.log").open("ab") as log:
            if name in self.workers and command[0] == sys.executable:
                process = ForkedService(*command[2:], stdout=log, stderr=log)
            else:
                process = subprocess.Popen(command, cwd=REPO, stdout=log, stderr=log)
            self.processes[name] = process

    def ready(self, name: str) -> bool:
        """Say whether the running process of this name has written its ready file."""
        process = self.processes[name]
        try:
            record = json.loads((self.home / "run" / f"{name}.ready").read_text())
        except (OSError, ValueError):
            return False
        return bool(record["pid"] == process.pid and process.poll() is None)

    def wait_ready(self, names: list[str], timeout: float = 90.0) -> None:
        """Wait until all are ready; a process that exited fails at once with its log."""
        end = time.monotonic() + timeout
        waiting = list(names)
        while waiting:
            waiting = [n for n in waiting if not self.ready(n)]
            for name in waiting:
                if self._keeper is None and self.processes[name].poll() is not None:
                    raise AssertionError(f"{name} exited:\n{self.log(name)}")
            if time.monotonic() > end:
                raise AssertionError(f"not ready: {waiting}\n{self.log(waiting[0])}")
            time.sleep(0.05)

    def log(self, name: str, lines: int = 40) -> str:
        """Return the end of a service's output."""
        text = (self.home / f"{name}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal; SIGKILL also waits for the end of the process."""
        with self._lock:
            process = self.processes[name]
            process.send_signal(number)
            if number == signal.SIGKILL:
                process.wait(10)

    def restart(self, name: str, timeout: float = 60.0) -> None:
        """Start a killed service again and wait until it is ready."""
        with self._lock:
            self.processes[name].wait(30)
            self.spawn(name)
        self.wait_ready([name], timeout)

    def keep(self) -> None:
        """From now on start every process again as soon as it has died (as a supervisor does)."""
        self._keeper = threading.Thread(target=self._keep_alive, name="keeper", daemon=True)
        self._keeper.start()

    def _keep_alive(self) -> None:
        while not self._keeping.wait(0.05):
            with self._lock:
                for name, process in list(self.processes.items()):
                    if process.poll() is not None and not self._keeping.is_set():
                        self.spawn(name)

    def wait_idle(self, client: Client, timeout: float = 45.0) -> dict[str, Any]:
        """Wait until no request is open and every pool is at rest; return the status."""
        end = time.monotonic() + timeout
        while True:
            try:
                status: dict[str, Any] = client.status()
            except DiptychError as error:  # the gateway is about to find the new router
                assert error.retryable and time.monotonic() < end, error
                continue
            loads = [w["load"] for w in status["workers"]]
            busy = [
                load
                for load in loads
                if load["busy"] or load["blocks_leased"] or load["blocks_active"]
            ]
            if not busy and not status["open_requests"] and len(loads) == len(self.workers):
                return status
            assert time.monotonic() < end, status
            time.sleep(0.2)

    def wait_paths(self, client: Client, timeout: float = 60.0) -> list[dict[str, Any]]:
        """Wait until each decode worker has a path to each prefill worker; return all pairs."""
        roles = self.tree["workers"]
        wanted = roles["prefill"]["count"] * roles["decode"]["count"]
        end = time.monotonic() + timeout
        while True:
            pairs = [pair for worker in client.status()["workers"] for pair in worker["pairs"]]
            if sum(pair["path"] is not None for pair in pairs) == wanted:
                return pairs
            assert time.monotonic() < end, pairs
            time.sleep(0.1)

    def stop(self) -> dict[str, int]:
        """Stop everything in order; return the exit codes. Leaves nothing behind."""
        if self._keeper is not None:
            self._keeping.set()
            self._keeper.join(5)
        codes: dict[str, int] = {}
        for name in reversed(self.names):
            process = self.processes.get(name)
            if process is None:
                continue
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                codes[name] = process.wait(45)
            except subprocess.TimeoutExpired:
                process.kill()
                codes[name] = process.wait(10)
        return codes

    def remove(self) -> None:
        """Delete logs and sockets."""
        shutil.rmtree(self.home, ignore_errors=True)


def serving(fleet: Fleet) -> Iterator[Fleet]:
    """The body of a fixture: started here, and at the end every service must end well."""
    try:
        yield fleet.start()
        codes = fleet.stop()
        assert set(codes.values()) == {0}, (codes, {n: fleet.log(n, 15) for n in codes})
    finally:
        fleet.stop()
        fleet.remove()
