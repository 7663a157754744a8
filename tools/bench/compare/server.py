"""A peer's OpenAI server as a child process."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from msgspec import Struct

from shared.engine.model_files import resolve_model
from shared.errors import ResourceMissing
from tools.bench.engine.kv_bytes import kv_token_bytes
from tools.bench.peers.models import model_for
from tools.bench.peers.peer import Peer, environment

_LONGEST = 2048
_CLIENTS = 32
_READY_TIMEOUT = 900.0
_STOP_TIMEOUT = 30.0
_POLL = 0.5


class Server(Struct, frozen=True, kw_only=True):
    """A started peer."""

    name: str
    url: str
    process: subprocess.Popen[bytes]

    def signal(self, number: signal.Signals) -> None:
        """Signal the server and all its children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


@contextlib.contextmanager
def serving(peer: Peer, model: str, cores: tuple[int, ...]) -> Iterator[Server]:
    """Start the server on ``cores``, wait until it answers, and end it afterwards.

    Its log stays only where something failed.

    Raises:
        ResourceMissing: it does not start; with its last words and the place of its log.
    """
    assert peer.server is not None
    model_dir = resolve_model(model)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = {
        "model": model_for(peer, model, model_dir),
        "port": port,
        "longest": _LONGEST,
        "threads": len(cores),
    }
    kv_bytes = _LONGEST * _CLIENTS * kv_token_bytes(model_dir)
    log = Path(tempfile.mkdtemp(prefix="diptych-bench-")) / f"{peer.name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [peer.python, "-m", *(word.format(**words) for word in peer.server)],
            stdout=file,
            stderr=file,
            env={**os.environ, **environment(peer, cores, kv_bytes)},
            start_new_session=True,
        )
    os.sched_setaffinity(process.pid, cores)
    server = Server(name=peer.name, url=f"http://127.0.0.1:{port}", process=process)
    try:
        _wait_ready(server, log)
        yield server
    finally:
        server.signal(signal.SIGCONT)
        server.signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            server.signal(signal.SIGKILL)
            process.wait(_STOP_TIMEOUT)
    shutil.rmtree(log.parent)


def _wait_ready(server: Server, log: Path) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            if httpx.get(f"{server.url}/v1/models", timeout=5.0, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            time.sleep(_POLL)
    lines = log.read_text(errors="replace").strip().splitlines()[-1:]
    raise ResourceMissing(f"{server.name} does not serve: {''.join(lines)[:300]} (log: {log})")
