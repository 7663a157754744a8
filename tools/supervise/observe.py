"""Turn what supervisor and ready files say into events: pure, fed with snapshots."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from tools.supervise.control import ProcessState

MAX_STARTS = 5
"""Starts in a row without becoming ready after which a process is given up."""
EXIT_REFUSED = 2
"""A service that exits with 2 found its config or resources wrong: no restart helps."""


class Ready(Struct, frozen=True, kw_only=True):
    """Content of a ready file."""

    pid: int
    incarnation: int
    url: str | None = None


class BecameReady(Struct, frozen=True, kw_only=True):
    """A process is ready; ``again`` after a restart. ``seconds`` since it was first missed."""

    name: str
    pid: int
    seconds: float
    again: bool


class Ended(Struct, frozen=True, kw_only=True):
    """A process that was ready is gone; the supervisor starts it again."""

    name: str
    pid: int


class Failed(Struct, frozen=True, kw_only=True):
    """A process cannot run: it refused in one sentence (exit code 2), or keeps crashing."""

    name: str
    reason: Literal["refused", "crashed"]


Event = BecameReady | Ended | Failed


class Watch:
    """Follows every process of a run."""

    def __init__(self, names: list[str], now: float) -> None:
        self._followed = {name: _Followed(since=now) for name in names}

    @property
    def all_ready(self) -> bool:
        """True while every process is ready."""
        return all(followed.ready_pid for followed in self._followed.values())

    def update(
        self, states: Mapping[str, ProcessState], ready: Mapping[str, Ready], now: float
    ) -> list[Event]:
        """Compare a snapshot with the one before and return what changed."""
        events: list[Event] = []
        for name, followed in self._followed.items():
            state = states.get(name)
            if state is not None:
                events += _follow(name, followed, state, ready.get(name), now)
        return events


class _Followed(Struct):
    since: float
    ready_pid: int = 0
    was_ready: bool = False
    last_pid: int = 0
    starts: int = 0


def _follow(
    name: str, followed: _Followed, state: ProcessState, ready: Ready | None, now: float
) -> list[Event]:
    events: list[Event] = []
    if state.pid and state.pid != followed.last_pid:
        followed.last_pid = state.pid
        followed.starts += 1
    is_ready = ready is not None and ready.pid == state.pid
    if followed.ready_pid and not (is_ready and state.pid == followed.ready_pid):
        events.append(Ended(name=name, pid=followed.ready_pid))
        followed.ready_pid = 0
        followed.since = now
    if is_ready and not followed.ready_pid:
        followed.ready_pid = state.pid
        followed.starts = 0
        seconds = now - followed.since
        events.append(
            BecameReady(name=name, pid=state.pid, seconds=seconds, again=followed.was_ready)
        )
        followed.was_ready = True
    if state.statename == "EXITED" and state.exitstatus == EXIT_REFUSED:
        events.append(Failed(name=name, reason="refused"))
    elif state.statename == "FATAL" or followed.starts > MAX_STARTS:
        events.append(Failed(name=name, reason="crashed"))
    return events
