"""Turn what supervisor and ready files say into events: pure, fed with snapshots."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from tools.supervise.control import ProcessState

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
        self._since = dict.fromkeys(names, now)
        self._ready: dict[str, int] = {}
        self._seen: set[str] = set()

    @property
    def all_ready(self) -> bool:
        """True while every process is ready."""
        return len(self._ready) == len(self._since)

    def update(
        self, states: Mapping[str, ProcessState], ready: Mapping[str, Ready], now: float
    ) -> list[Event]:
        """Compare a snapshot with the one before and return what changed."""
        events: list[Event] = []
        for name in self._since:
            state = states.get(name)
            if state is None:
                continue
            failure = _failure(state)
            if failure is not None:
                self._ready.pop(name, None)
                events.append(failure)
                continue
            events += self._update_one(name, state, ready.get(name), now)
        return events

    def _update_one(
        self, name: str, state: ProcessState, ready: Ready | None, now: float
    ) -> list[Event]:
        events: list[Event] = []
        known = self._ready.get(name)
        alive = ready is not None and ready.pid == state.pid
        if known is not None and not (alive and known == state.pid):
            del self._ready[name]
            self._since[name] = now
            events.append(Ended(name=name, pid=known))
            known = None
        if known is None and alive:
            self._ready[name] = state.pid
            seconds = now - self._since[name]
            again = name in self._seen
            self._seen.add(name)
            events.append(BecameReady(name=name, pid=state.pid, seconds=seconds, again=again))
        return events


def _failure(state: ProcessState) -> Failed | None:
    if state.statename in ("EXITED", "BACKOFF") and state.exitstatus == EXIT_REFUSED:
        return Failed(name=state.name, reason="refused")
    if state.statename == "FATAL":
        return Failed(name=state.name, reason="crashed")
    return None
