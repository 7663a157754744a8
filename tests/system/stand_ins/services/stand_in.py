"""One process that keeps the contract of every service and misbehaves on request.

``behaviour.json`` in the working directory maps a process name to what it does wrong.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from shared.config import load_deployment
from shared.runtime import runtime_dir

MODEL = "stand-in"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({"data": [{"id": MODEL}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({"choices": []})

    def _answer(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def serve_http(address: str) -> str:
    host, _, port = address.rpartition(":")
    server = ThreadingHTTPServer((host, int(port)), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://{address}"


def main(serve: Callable[[str], str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--name")
    parser.add_argument("--die-with-parent", type=int)
    given = parser.parse_args()
    deployment = load_deployment(given.config)
    place = runtime_dir(deployment)
    behaviours = Path("behaviour.json")
    wrong = json.loads(behaviours.read_text()) if behaviours.exists() else {}
    behaviour = wrong.get(given.name, "")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if behaviour == "refuse":
        print("error: `model.path` is not a model", file=sys.stderr)
        return 2
    if behaviour == "crash":
        raise RuntimeError("boom")
    unix = socket.socket(socket.AF_UNIX)
    path = place / f"{given.name}.sock"
    path.unlink(missing_ok=True)
    unix.bind(str(path))
    facts = {"pid": os.getpid(), "incarnation": time.time_ns() % 2**53}
    if serve is not None:
        facts["url"] = serve(deployment.gateway.http)
    ready = place / f"{given.name}.ready"
    fresh = place / f"{given.name}.ready.new"
    fresh.write_text(json.dumps(facts))
    fresh.replace(ready)
    while not stop.wait(0.5):
        pass
    if behaviour == "ignore-sigterm":
        time.sleep(600)
    with (place / "logs" / "order").open("a") as order:
        order.write(f"{given.name}\n")
    ready.unlink()
    path.unlink()
    return 0
