"""Turns of a thread that fail one after the other: it neither spins nor floods the log."""

import time
from collections.abc import Callable
from typing import Final

_FIRST: Final = 0.01
_LONGEST: Final = 1.0


class Stumbles:
    """One failure alone costs no time.

    After more, such as those over a socket that is gone, the thread rests for longer and longer,
    up to a second.
    """

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._rest = 0.0

    def none(self) -> None:
        """A turn went well."""
        self._rest = 0.0

    def another(self) -> None:
        """Rest if the turn before failed, too."""
        if self._rest > 0:
            self._sleep(self._rest)
        self._rest = min(_LONGEST, 2 * self._rest or _FIRST)
