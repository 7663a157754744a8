"""Warnings of which one failure can cause thousands: a few at once, then one a second."""

import logging
import time
from typing import Final

_BURST: Final = 20
_PER_SECOND: Final = 1.0
_LENGTH: Final = 600


class LineBudget:
    """How many lines may be written at a time; ``now`` is seconds on a steady clock."""

    def __init__(self, burst: int = _BURST, per_second: float = _PER_SECOND) -> None:
        self._burst = burst
        self._per_second = per_second
        self._left = float(burst)
        self._filled_at: float | None = None

    def take(self, now: float) -> bool:
        """Return whether one more line may be written now, and count it."""
        since = 0.0 if self._filled_at is None else now - self._filled_at
        self._filled_at = now
        self._left = min(float(self._burst), self._left + since * self._per_second)
        if self._left < 1:
            return False
        self._left -= 1
        return True


class BoundedLog:
    """Writes warnings within a budget, and says how many it left out."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._budget = LineBudget()
        self._omitted = 0
        self._announced = False

    def warning(self, text: str) -> None:
        """Write one line, whatever ``text`` contains, or count it as left out."""
        if not self._budget.take(time.monotonic()):
            self._omitted += 1
            if not self._announced:
                self._announced = True
                self._log.warning("more of this kind follows faster than it is written")
            return
        self._log.warning("%s%s", one_line(text), self._left_out())

    def flush(self) -> None:
        """Tell what was left out if nothing has come since; called about once a second."""
        if not self._omitted:
            self._announced = False
        elif self._budget.take(time.monotonic()):
            self._log.warning("no more of this kind%s", self._left_out())

    def _left_out(self) -> str:
        rest = f" ({self._omitted} lines before this one were left out)" if self._omitted else ""
        self._omitted = 0
        return rest


def one_line(text: str) -> str:
    """Return the text in one line of bounded length: parts of it come from clients and peers."""
    short = text if len(text) <= _LENGTH else text[: _LENGTH - 1] + "\u2026"
    return "".join(c if c.isprintable() else "?" for c in short)
