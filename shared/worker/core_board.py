"""Which workers of a node have nothing to compute, so that others may take their cores."""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from shared.worker.cores import Share

_UNKNOWN: Final = 0
_IDLE: Final = 1
_BUSY: Final = 2


class CoreBoard:
    """A file that all workers of a deployment on a node map: one byte each, written by its owner.

    Nothing is locked. A worker that looks a moment too early shares a core for one step, and one
    that was killed while it computed lends nothing until it is there again.

    Args:
        folder: of the node's workers and nobody else.
        index: of this worker in ``shares``.
        shares: the cores of all workers of the deployment, in an order that all agree on. Of
            those on other machines nothing is ever heard, so their shares are not used.
    """

    def __init__(self, folder: Path, index: int, shares: Sequence[Share]) -> None:
        self._index = index
        self._shares = tuple(shares)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(folder / f"cores-{len(shares)}", flags, 0o600)
        try:
            os.ftruncate(file, len(shares))
            self._states = mmap.mmap(file, len(shares))
        finally:
            os.close(file)
        self.mark("idle")

    def mark(self, state: Literal["idle", "busy"]) -> None:
        """Say what this worker does."""
        self._states[self._index] = _BUSY if state == "busy" else _IDLE

    def idle_cores(self) -> tuple[int, ...]:
        """Return CPUs for one thread each: of idle workers, and of no other one nor this one."""
        taken = set(self._shares[self._index].cores)
        free: list[int] = []
        for share, state in zip(self._shares, self._states[:], strict=True):
            if state == _BUSY:
                taken.update(share.cores)
            elif state == _IDLE:
                free += share.cores[: share.threads]
        return tuple(cpu for cpu in dict.fromkeys(free) if cpu not in taken)

    def close(self) -> None:
        """Let go of the file; this worker counts as idle from now on."""
        if not self._states.closed:
            self.mark("idle")
            self._states.close()
