"""Lets a service sleep until its state machine wants to know the time again."""

import asyncio

from shared.clock import Clock

_LATE = 0.002
"""Seconds by which to ring late rather than early: loops count whole milliseconds."""


class Alarm:
    """One sleeper, and a moment on ``clock`` that others may bring forward meanwhile."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at = float("inf")
        self._sleeper: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def sleep_until(self, at: float) -> None:
        """Return at ``at`` or at an earlier moment given to ``no_later_than`` meanwhile."""
        self._sleeper = asyncio.get_running_loop().create_future()
        self._set(at)
        try:
            await self._sleeper
        finally:
            self._at, self._sleeper = float("inf"), None
            self._stop()

    def no_later_than(self, at: float) -> None:
        """Bring the moment forward; nothing happens while nobody sleeps, or if it is later."""
        if self._sleeper is not None and at < self._at:
            self._set(at)

    def _set(self, at: float) -> None:
        self._stop()
        self._at = at
        delay = max(0.0, at - self._clock.now()) + _LATE
        self._timer = asyncio.get_running_loop().call_later(delay, self._ring)

    def _ring(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
