"""Silent peers and dead processes."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.transport.liveness import PeerClock, watch_pid

Run = Callable[..., Any]


def test_silent_peers_are_reported_once_most_silent_first() -> None:
    clock = PeerClock[str](timeout=5.0)
    clock.heard("a", 0.0)
    clock.heard("b", 1.0)
    clock.heard("c", 4.0)
    assert clock.overdue(5.0) == []
    assert clock.overdue(6.5) == ["a", "b"]
    assert clock.overdue(6.5) == []
    assert len(clock) == 1


def test_age_and_forgetting() -> None:
    clock = PeerClock[str](timeout=5.0)
    assert clock.age("a", 1.0) is None
    clock.heard("a", 1.0)
    assert clock.age("a", 3.5) == 2.5
    assert clock.age("a", 0.5) == 0.0
    clock.forget("a")
    clock.forget("a")
    assert clock.age("a", 3.5) is None


def test_full_table_takes_no_strangers_but_keeps_hearing_its_own() -> None:
    """Made-up identities must not take memory without limit, nor push real peers out."""
    clock = PeerClock[int](timeout=5.0, capacity=2)
    assert clock.heard(1, 0.0)
    assert clock.heard(2, 0.0)
    assert not clock.heard(3, 0.0)
    assert clock.heard(1, 1.0)
    assert clock.overdue(5.5) == [2]
    assert clock.heard(3, 6.0)


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 100)), max_size=50))
def test_every_peer_heard_is_live_or_overdue(events: list[tuple[int, float]]) -> None:
    """Late or reordered signs of life must not make a peer older."""
    clock = PeerClock[int](timeout=10.0)
    latest: dict[int, float] = {}
    for peer, now in events:
        clock.heard(peer, now)
        latest[peer] = max(now, latest.get(peer, now))
    late = clock.overdue(100.0)
    assert sorted(late) == sorted(p for p, at in latest.items() if 100.0 - at > 10.0)
    assert len(clock) == len(latest) - len(late)


def _sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_kill_is_noticed_at_once(run: Run) -> None:
    """Waiting for a heartbeat timeout would cost seconds per crash."""

    async def main() -> None:
        child = _sleeper()
        ended = asyncio.Event()
        watch = watch_pid(asyncio.get_running_loop(), child.pid, ended.set)
        assert not ended.is_set()
        child.kill()
        await asyncio.wait_for(ended.wait(), 10)
        watch.cancel()
        await asyncio.to_thread(child.wait, 10)

    run(main())


def test_process_that_is_no_child_is_watched_too(run: Run) -> None:
    """Services watch one another, and none of them is the other's parent."""
    script = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "input()\n"
        "child.communicate(timeout=10)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())

    async def main() -> None:
        ended = asyncio.Event()
        watch_pid(asyncio.get_running_loop(), grandchild, ended.set)
        await asyncio.to_thread(parent.communicate, "\n", 10)
        await asyncio.wait_for(ended.wait(), 10)

    run(main())


def test_process_gone_before_the_watch_is_reported(run: Run) -> None:
    async def main() -> None:
        child = _sleeper()
        child.kill()
        child.wait(10)
        ended = asyncio.Event()
        watch_pid(asyncio.get_running_loop(), child.pid, ended.set)
        assert not ended.is_set()  # never from inside the call: the caller has no handle yet
        await asyncio.wait_for(ended.wait(), 10)

    run(main())


@pytest.mark.parametrize("pid", [0, -1, 2**31 - 1, 2**70])
def test_numbers_that_are_no_process_count_as_gone(run: Run, pid: int) -> None:
    """The pid comes from a peer's message: nonsense must not raise in the receiver."""

    async def main() -> None:
        ended = asyncio.Event()
        watch_pid(asyncio.get_running_loop(), pid, ended.set)
        await asyncio.wait_for(ended.wait(), 10)

    run(main())


def test_cancelled_watch_stays_silent(run: Run) -> None:
    async def main() -> None:
        child = _sleeper()
        calls: list[int] = []
        loop = asyncio.get_running_loop()
        before = len(os.listdir("/proc/self/fd"))
        watch = watch_pid(loop, child.pid, lambda: calls.append(1))
        gone = watch_pid(loop, -1, lambda: calls.append(2))
        for handle in (watch, gone, watch):
            handle.cancel()
        assert len(os.listdir("/proc/self/fd")) == before
        other = asyncio.Event()
        watch_pid(loop, child.pid, other.set)
        child.kill()
        await asyncio.wait_for(other.wait(), 10)
        assert calls == []
        child.wait(10)

    run(main())
