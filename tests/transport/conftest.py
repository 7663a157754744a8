"""Both loops, both transports, one context per test."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from tests.conftest import RunAsync
from tests.nursery import kept
from tests.transport.harness import Context, short_directory

nursery = pytest.fixture(scope="session", autouse=True)(kept)


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest, run_async: RunAsync) -> Callable[..., Any]:
    """``run_async`` on each of the two loops."""
    factories = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return partial(run_async, loop_factory=factories[request.param])


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def directory() -> Iterator[Path]:
    path = short_directory()
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def model() -> Iterator[Path]:
    """A tiny random model that workers serve; nobody writes to it."""
    # Here and not above: most of these tests need neither torch nor transformers.
    from tests.transport.worker_rig import make_model

    path = short_directory()
    yield make_model(path / "model")
    shutil.rmtree(path)


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest, directory: Path) -> str:
    """Where to bind; the link's ``endpoint`` attribute is where to connect."""
    return f"ipc://{directory}/link.sock" if request.param == "ipc" else "tcp://127.0.0.1:0"
