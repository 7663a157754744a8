"""Every test runs under a leak check; ``run_async`` runs a coroutine under a deadline."""

import asyncio
import gc
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
import uvloop
import zmq

T = TypeVar("T")

_GRACE = 3.0
_PROCESS_LIFE_THREADS = re.compile(r"tqdm|TMonitor|pytest_timeout|auto_conversion|pydevd")
_PROCESS_LIFE_FDS = re.compile(r"/dev/(u?random|null|nvidia|dri|pts|tty)|/proc/|/sys/")
_KINDS = ("threads", "fds", "tasks", "memory", "children")

_passed = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"keeps(kind, ...): what this test may leave behind, of {', '.join(_KINDS)}; say why",
    )
    # libuv makes a signal pipe with its first loop and keeps it for the life of the process.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.get_loop()
    # pyzmq starts one thread with the first message sent without a copy, and keeps it.
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        push.bind("inproc://prime")
        pull.connect("inproc://prime")
        push.send(bytes(1 << 17), copy=False)
        pull.recv()
    context.term()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        item.stash[_passed] = report.passed
    return report


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a passing test that leaves threads, descriptors, tasks, memory files or children.

    Fixtures of a wider scope come before this one, so what they hold is not counted.
    """
    marker = request.node.get_closest_marker("keeps")
    kinds = [kind for kind in _KINDS if marker is None or kind not in marker.args]
    before = _held(kinds)
    yield
    if not request.node.stash.get(_passed, False):
        return  # the traceback of a failed test holds its objects
    left = _held(kinds) - before
    if left:
        gc.collect()
        deadline = time.monotonic() + _GRACE
        while (left := _held(kinds) - before) and time.monotonic() < deadline:
            time.sleep(0.02)
    if left:
        pytest.fail("left behind: " + ", ".join(sorted(left.elements())), pytrace=False)


class RunAsync(Protocol):
    def __call__(
        self,
        coroutine: Coroutine[Any, Any, T],
        timeout: float = 60.0,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    ) -> T: ...


@pytest.fixture
def run_async() -> RunAsync:
    """Run a coroutine on its own loop; what reaches the loop's exception handler fails the test."""

    def run(
        coroutine: Coroutine[Any, Any, T],
        timeout: float = 60.0,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    ) -> T:
        unhandled: list[dict[str, Any]] = []

        async def bounded() -> T:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: unhandled.append(context))
            async with asyncio.timeout(timeout):
                return await coroutine

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            result = runner.run(bounded())
        for context in unhandled:
            raise AssertionError(context["message"]) from context.get("exception")
        return result

    return run


def _held(kinds: list[str]) -> Counter[str]:
    held: Counter[str] = Counter()
    for kind in kinds:
        held.update(_COUNT[kind]())
    return held


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if not _PROCESS_LIFE_THREADS.search(thread.name):
            yield f"thread {thread.name}"


def _fds() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the one of the listing itself
        if not _PROCESS_LIFE_FDS.match(target):
            yield "fd " + re.sub(r":\[\d+\]", "", target)


def _tasks() -> Iterator[str]:
    for task in list(asyncio.tasks._all_tasks):  # type: ignore[attr-defined]
        if not task.done():
            yield f"task {task.get_coro()!r}"


def _memory() -> Iterator[str]:
    mapped = set(re.findall(r"/memfd:\S+|/dev/shm/\S+", Path("/proc/self/maps").read_text()))
    for name in mapped:
        yield f"mapping {name}"
    own = re.compile(rf"(?<!\d){os.getpid()}(?!\d)")  # other test runs share /dev/shm
    for name in os.listdir("/dev/shm"):
        if own.search(name):
            yield f"/dev/shm/{name}"


def _children() -> Iterator[str]:
    for thread in Path("/proc/self/task").iterdir():
        try:
            children = (thread / "children").read_text()
        except OSError:
            continue  # the thread ended
        for pid in children.split():
            yield f"child {pid}"


_COUNT: dict[str, Callable[[], Iterator[str]]] = {
    "threads": _threads,
    "fds": _fds,
    "tasks": _tasks,
    "memory": _memory,
    "children": _children,
}
