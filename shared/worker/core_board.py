"""Which workers of a node have nothing to compute, so that others may take their cores."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from shared.worker.cores import Share

log = logging.getLogger(__name__)

_IDLE: Final = 1
_BUSY: Final = 2
"""Every other byte is a worker that nothing is known of."""


class CoreBoard:
    """A file of one byte per worker of a deployment, each written by its owner.

    Nothing is locked. A worker that looks a moment too early shares a core for one step, and one
    that was killed while it computed lends nothing until it is there again. Without the file,
    which is said once, nothing is lent and nothing borrowed. It is read and written, not mapped:
    a mapped file that somebody cuts short ends the process.

    Args:
        folder: of the node's workers and nobody else.
        index: of this worker in ``shares``.
        shares: the cores of all workers of the deployment, in an order that all agree on. Of
            those on other machines nothing is ever heard, so their shares are not used.
    """

    def __init__(self, folder: Path, index: int, shares: Sequence[Share]) -> None:
        self._path = folder / f"cores-{len(shares)}"
        self._index = index
        self._shares = tuple(shares)
        self._state = _IDLE
        self._file: int | None = None
        self._told = False
        self.refresh()

    def mark(self, state: Literal["idle", "busy"]) -> None:
        """Say what this worker does; ``refresh`` sees to it that it stands there."""
        before, self._state = self._state, _BUSY if state == "busy" else _IDLE
        if self._state != before:  # not once more with every step
            self._write()

    def idle_cores(self) -> tuple[int, ...]:
        """Return CPUs for one thread each: of idle workers, and of no other one nor this one."""
        if self._file is None:
            return ()
        taken = set(self._shares[self._index].cores)
        free: list[int] = []
        states = os.pread(self._file, len(self._shares), 0)
        for share, state in zip(self._shares, states, strict=False):
            if state == _BUSY:
                taken.update(share.cores)
            elif state == _IDLE:
                free += share.cores[: share.threads]
        return tuple(cpu for cpu in dict.fromkeys(free) if cpu not in taken)

    def refresh(self) -> None:
        """Find the file again where it was removed or replaced, and write this worker's byte."""
        try:
            if self._file is None or not os.path.samestat(os.fstat(self._file), self._path.lstat()):
                self._open()
        except FileNotFoundError:
            self._open()
        except OSError as error:
            self._give_up(error)
        self._write()

    def close(self) -> None:
        """Let go of the file; this worker counts as idle from now on."""
        if self._file is not None:
            self.mark("idle")
            self._forget()

    def _open(self) -> None:
        self._forget()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._file = os.open(self._path, flags, 0o600)
        except OSError as error:
            self._give_up(error)

    def _write(self) -> None:
        if self._file is None:
            return
        try:
            os.pwrite(self._file, bytes([self._state]), self._index)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._forget()
        if not self._told:
            self._told = True
            log.warning("cores are neither lent nor borrowed: %s", error)

    def _forget(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
