"""Time sources. State machines are handed ``now``; only services read a clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on an arbitrary but steady scale."""

    def now(self) -> float: ...


class MonotonicClock:
    """``CLOCK_MONOTONIC``: one scale for all processes of a host since its boot."""

    def now(self) -> float:
        return time.monotonic()
