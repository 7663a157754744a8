"""Runs callbacks once the message in hand has been dealt with, one loop callback for all."""

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class Later:
    """One message of the router brings tokens of many calls, and each call has its writer."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def __call__(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` soon, in order. What it raises is logged."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._run)
        self._waiting.append(callback)

    def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            try:
                callback()
            except Exception:
                log.exception("a call's output could not be passed on")
