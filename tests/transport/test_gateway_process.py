"""The gateway as a process: exit codes, sentences, ready file, nothing left behind."""

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
import zmq

from tests.conftest import RunAsync
from tests.transport.gateway_rig import ScriptedRouter
from tests.transport.harness import short_directory
from tests.unit.gateway_model import NAME
from tests.unit.gateway_model import tokenizer as tokenizer

pytestmark = pytest.mark.usefixtures("tokenizer")
REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def home() -> Iterator[Path]:
    path = short_directory()
    yield path
    shutil.rmtree(path)


def write_config(home: Path, **gateway: Any) -> Path:
    tree = {
        "name": "t",
        "deployment_type": "split",
        "model": {"path": NAME},
        "workers": {"prefill": {"count": 1}, "decode": {"count": 1}},
        "gateway": {"http": "127.0.0.1:0"} | gateway,
        "runtime_dir": str(home / "run"),
    }
    path = home / "deployment.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@contextlib.asynccontextmanager
async def process(config: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.gateway",
        "--config",
        str(config),
        cwd=REPO,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def refused(config: Path) -> str:
    async with process(config) as child:
        _, errors = await child.communicate()
        assert child.returncode == 2, errors.decode()
        return errors.decode()


def test_port_in_use_is_one_sentence(run_async: RunAsync, home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = run_async(refused(write_config(home, http=f"127.0.0.1:{port}")))
    assert text.startswith(f"error: port {port} on 127.0.0.1 is in use")
    assert text.count("\n") == 1
    assert not list((home / "run").glob("*.sock"))


@pytest.mark.parametrize(
    ("gateway", "words"),
    [
        ({"http": "0.0.0.0:8000"}, "gateway.api_keys"),
        ({"http": "8000"}, "host:port"),
        ({"http": "127.0.0.1:99999"}, "host:port"),
        ({"api_keys": {"": "red"}}, "gateway.api_keys"),
        ({"zmq": "tcp://0.0.0.0:7000"}, "diptych keys"),
    ],
)
def test_unsafe_or_wrong_config_is_refused(
    run_async: RunAsync, home: Path, gateway: dict[str, Any], words: str
) -> None:
    """An API open to the network without keys must not start."""
    text = run_async(refused(write_config(home, **gateway)))
    assert text.startswith("error: ") and words in text


def test_life_of_the_process(run_async: RunAsync, home: Path) -> None:
    """Ready only when the router knows it; SIGTERM exits 0 and leaves no file behind."""

    async def main() -> None:
        config = write_config(home)
        run = home / "run"
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        async with process(config) as child:
            router = ScriptedRouter(context, f"ipc://{run}/router-gateways.sock")
            router.end_after = 4
            ready = run / "gateway.ready"
            while not ready.exists():
                assert child.returncode is None
                await asyncio.sleep(0.02)
            facts = json.loads(ready.read_text())
            assert facts["pid"] == child.pid
            async with httpx.AsyncClient(base_url=facts["url"]) as client:
                answer = await client.post("/v1/completions", json={"prompt": "x"})
                assert answer.json()["choices"][0]["finish_reason"] == "stop"
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == 0
        router.close()
        context.term()
        assert list(run.iterdir()) == []

    run_async(main(), 40.0)
