"""A container is healthy when its own service is, never for what another container runs."""

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tools.health import check


class Proc:
    """A proc file system with chosen processes, and ready files that name them."""

    def __init__(self, root: Path) -> None:
        self.proc, self.run = root / "proc", root / "run"
        self.run.mkdir(parents=True)
        self.process("self", "tools.health")

    def process(self, pid: str, module: str, mounts: str = "mnt:[1]") -> None:
        place = self.proc / pid
        (place / "ns").mkdir(parents=True)
        (place / "ns/mnt").symlink_to(mounts)
        (place / "cmdline").write_bytes(b"\0".join((b"python", b"-m", module.encode(), b"")))

    def ready(self, name: str, pid: int, **facts: str) -> None:
        (self.run / f"{name}.ready").write_text(json.dumps({"pid": pid, **facts}))

    def check(self) -> str | None:
        return check(self.run, self.proc)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


@pytest.mark.parametrize(("name", "module"), [("decode-1", "decode"), ("mixed-0", "decode")])
def test_the_service_of_this_container_counts(proc: Proc, name: str, module: str) -> None:
    proc.process("7", f"services.{module}")
    assert proc.check() is not None, "not ready yet"
    proc.ready(name, 7)
    assert proc.check() is None


def test_another_container_of_the_same_pid_namespace_does_not(proc: Proc) -> None:
    proc.process("7", "services.decode", mounts="mnt:[2]")
    proc.ready("decode-0", 7)
    assert "no service of this container" in str(proc.check())


def test_a_pid_that_means_another_process_here_does_not(proc: Proc) -> None:
    """The router's pid comes from another pid namespace; here it is the gateway's."""
    proc.process("7", "services.gateway")
    proc.ready("router", 7)
    assert proc.check() is not None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": "x"}', '{"pid": 7'])
def test_a_broken_ready_file_is_no_service(proc: Proc, text: str) -> None:
    proc.process("7", "services.decode")
    (proc.run / "decode-0.ready").write_text(text)
    assert proc.check() is not None


class _Answer(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        assert self.path == "/readyz"
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"as it is")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), _Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("status", [200, 503])
def test_a_gateway_is_asked(
    proc: Proc, server: HTTPServer, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Answer, "status", status)
    proc.process("1", "services.gateway")
    proc.ready("gateway", 1, url=f"http://127.0.0.1:{server.server_port}")
    found = proc.check()
    assert (found is None) is (status == 200)
    assert found is None or "503: as it is" in found


def test_a_gateway_that_does_not_answer_is_not_healthy(proc: Proc) -> None:
    proc.process("1", "services.gateway")
    proc.ready("gateway", 1, url="http://127.0.0.1:1")
    assert "does not answer" in str(proc.check())
    assert os.listdir(proc.run) == ["gateway.ready"]
