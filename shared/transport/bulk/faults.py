"""Harm on purpose: what a bad network does to KV chunks, for users and tests (``faults:``)."""

import os
import random
import signal
from collections.abc import Callable, Sequence

from msgspec import Struct

from shared.config import ChunkFault, FaultsSection
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


class FaultyLink:
    """Stands between the sender of chunks and its socket. Pure but for ``kill``.

    ``passed`` counts chunks given in; a rule with ``chunk: i`` strikes the i-th (from 0), one
    with ``probability`` any, at most ``times`` times.
    """

    def __init__(
        self,
        section: FaultsSection,
        worker: str,
        kill: Callable[[], None] = _kill_process,
    ) -> None:
        self._random = random.Random(section.seed)
        rules = [rule for rule in section.chunks if rule.worker in (None, worker)]
        self._rules = [[rule, _times(rule)] for rule in rules]
        self._kill = kill
        self._held: list[_Held] = []
        self._swapped: list[Parcel] = []
        self._stalled_until = 0.0
        self.passed = 0
        self.struck = 0

    def give(self, parcel: Parcel, now: float) -> list[Parcel]:
        """Take a chunk in and return what goes out now."""
        number, self.passed = self.passed, self.passed + 1
        rule = self._strikes(number)
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

    def _strikes(self, number: int) -> ChunkFault | None:
        for entry in self._rules:
            rule, left = entry
            assert isinstance(rule, ChunkFault) and isinstance(left, int)
            if left == 0:
                continue
            hit = rule.chunk == number
            if rule.probability is not None:
                hit = self._random.random() < rule.probability
            if hit:
                entry[1] = left - 1
                self.struck += 1
                return rule
        return None

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


def _times(rule: ChunkFault) -> int:
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
