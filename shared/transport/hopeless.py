"""When a connecting socket must be opened anew because libzmq has given it up."""

from typing import Final

HOPELESS: Final = 10.0
"""Seconds. libzmq ends a DEALER's session for good, without a reconnect, when what answers at the
address speaks no ZMTP or another mechanism. A peer that lives but does not read for so long has
lost its queue to the heartbeat's 5 s already, so opening anew costs nothing more."""


class WriteWatch:
    """How long nothing could be written although something waits; ``now`` as of a steady clock."""

    def __init__(self) -> None:
        self._since: float | None = None

    def wrote(self) -> None:
        """Note that a message went out."""
        self._since = None

    def hopeless(self, now: float) -> bool:
        """Note that a message did not go out; True once per ``HOPELESS`` seconds of it."""
        if self._since is None:
            self._since = now
        if now - self._since < HOPELESS:
            return False
        self._since = now
        return True
