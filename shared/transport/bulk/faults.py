"""Harm on purpose: what a bad network does to KV chunks, for users and tests (``faults:``)."""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from shared.fault_rules import ChunkFault, FaultsSection
from shared.messages.bulk import Chunk


class Parcel(Struct, frozen=True):
    """One chunk on its way out."""

    peer: bytes
    header: Chunk
    frames: list[memoryview]


class _Held(Struct):
    due: float
    parcel: Parcel


def _kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Rule(Protocol):
    """What all faults say of when they strike."""

    @property
    def probability(self) -> float | None: ...
    @property
    def times(self) -> int | None: ...


Fault = TypeVar("Fault", bound=Rule)


class Strikes(Generic[Fault]):
    """Says which rule strikes next. Numbers count from 0; a rule with one strikes that only."""

    def __init__(self, rules: Sequence[tuple[int | None, Fault]], seed: int) -> None:
        self._random = random.Random(seed)
        self._rules = rules
        self._left = [_times(rule) for _, rule in rules]
        self.passed = 0
        self.struck = 0

    def next(self) -> Fault | None:
        """Let one more pass, and return what harm is to be done to it."""
        number, self.passed = self.passed, self.passed + 1
        for index, (wanted, rule) in enumerate(self._rules):
            if self._left[index] == 0:
                continue
            hit = wanted == number
            if rule.probability is not None:
                hit = self._random.random() < rule.probability
            if hit:
                self._left[index] -= 1
                self.struck += 1
                return rule
        return None


class FaultyCopies:
    """Stands between the copies out of shared memory and their check."""

    def __init__(
        self,
        section: FaultsSection,
        worker: str,
        kill: Callable[[int], None] = lambda pid: os.kill(pid, signal.SIGKILL),
    ) -> None:
        rules = [(rule.copy, rule) for rule in section.copies if rule.worker in (None, worker)]
        self._strikes = Strikes(rules, section.seed)
        self._kill = kill

    def after_copy(self, source_pid: int) -> str | None:
        """Do harm to a copy just made; ``fail`` and ``stale`` are for the caller to do."""
        rule = self._strikes.next()
        match rule and rule.kind:
            case "delay":
                assert rule is not None
                time.sleep(rule.delay)
            case "kill":
                self._kill(os.getpid())
            case "kill_source":
                self._kill(source_pid)
            case "fail" | "stale" as kind:
                return kind
        return None


class FaultyLink:
    """Stands between the sender of chunks and its socket. Pure but for ``kill``.

    A rule with ``chunk: i`` strikes the i-th (from 0), one with ``probability`` any, at most
    ``times`` times.
    """

    def __init__(
        self,
        section: FaultsSection,
        worker: str,
        kill: Callable[[], None] = _kill_process,
    ) -> None:
        rules = [(rule.chunk, rule) for rule in section.chunks if rule.worker in (None, worker)]
        self._strikes = Strikes(rules, section.seed)
        self._random = random.Random(section.seed)
        self._kill = kill
        self._held: list[_Held] = []
        self._swapped: list[Parcel] = []
        self._stalled_until = 0.0

    def give(self, parcel: Parcel, now: float) -> list[Parcel]:
        """Take a chunk in and return what goes out now."""
        rule = self._strikes.next()
        out = [parcel] if rule is None else self._harm(rule, parcel, now)
        if out and self._swapped:
            out += self._swapped
            self._swapped = []
        if now < self._stalled_until:
            self._held += [_Held(self._stalled_until, p) for p in out]
            return []
        return out

    def due(self, now: float) -> list[Parcel]:
        """Return held chunks whose time has come; swapped ones follow once nothing is held."""
        ready = [held.parcel for held in self._held if held.due <= now]
        self._held = [held for held in self._held if held.due > now]
        return ready

    def wait(self, now: float) -> float | None:
        """Return the seconds until something held is due, None when nothing is."""
        if not self._held:
            return None
        return max(0.0, min(held.due for held in self._held) - now)

    def _harm(self, rule: ChunkFault, parcel: Parcel, now: float) -> list[Parcel]:
        match rule.kind:
            case "drop":
                return []
            case "duplicate":
                return [parcel, parcel]
            case "corrupt":
                return [Parcel(parcel.peer, parcel.header, _flip(parcel.frames, self._random))]
            case "truncate":
                return [Parcel(parcel.peer, parcel.header, _cut(parcel.frames))]
            case "reorder":
                self._swapped.append(parcel)
                return []
            case "delay":
                self._held.append(_Held(now + rule.delay, parcel))
                return []
            case "stall":
                self._stalled_until = now + rule.delay
                return [parcel]
            case "kill":
                self._kill()
                return []


def _times(rule: Rule) -> int:
    if rule.times is not None:
        return rule.times
    return 1 if rule.probability is None else -1


def _flip(frames: Sequence[memoryview], dice: random.Random) -> list[memoryview]:
    spoiled = [bytearray(frame) for frame in frames]
    victim = dice.choice(spoiled)
    victim[dice.randrange(len(victim))] ^= 1 << dice.randrange(8)
    return [memoryview(frame) for frame in spoiled]


def _cut(frames: Sequence[memoryview]) -> list[memoryview]:
    *first, last = frames
    return [*first, last[: len(last) // 2]]
