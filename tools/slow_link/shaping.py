"""What a link does to packets of one direction: which are lost, and when the others leave. Pure."""

import random
from collections import deque

from msgspec import Struct


class LinkProfile(Struct, frozen=True, kw_only=True):
    """``rate`` in bytes per second (0: as fast as it goes), ``delay`` in seconds one way,
    ``loss`` as a share of packets, ``queue`` in bytes that wait for the rate at most."""

    rate: float = 0.0
    delay: float = 0.0
    loss: float = 0.0
    queue: int = 32 << 20
    seed: int = 1


class Direction:
    """The packets under way in one direction."""

    def __init__(self, profile: LinkProfile, seed: int) -> None:
        self._profile = profile
        self._dice = random.Random(seed)
        self._waiting: deque[tuple[float, memoryview]] = deque()
        self._free = 0.0
        self.passed = 0
        self.lost = 0

    def take(self, packet: memoryview, now: float) -> bool:
        """Let a packet enter. False: it is lost, by chance or as the queue is full."""
        link = self._profile
        queued = (self._free - now) * link.rate
        if self._dice.random() < link.loss or queued > link.queue:
            self.lost += 1
            return False
        self.passed += 1
        spent = len(packet) / link.rate if link.rate else 0.0
        self._free = max(now, self._free) + spent
        self._waiting.append((self._free + link.delay, packet))
        return True

    def due(self, now: float) -> list[memoryview]:
        """Return and forget the packets that are across by now, in order."""
        out: list[memoryview] = []
        while self._waiting and self._waiting[0][0] <= now:
            out.append(self._waiting.popleft()[1])
        return out

    def wait(self, now: float) -> float | None:
        """Return the seconds until a packet is across, None where none is under way."""
        if not self._waiting:
            return None
        return max(0.0, self._waiting[0][0] - now)
