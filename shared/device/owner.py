"""Whether another process still holds what it showed to this one."""

import os
from typing import Final

from shared.errors import TransferFailed

_FLAGS: Final = 6
"""Place of the flags in proc's stat, counted behind the name in brackets."""
_EXITING: Final = 0x4
"""PF_EXITING of linux/sched.h."""


class Owner:
    """A process of this pid namespace. A later one with the same pid is not taken for it.

    Raises:
        TransferFailed: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TransferFailed(f"process {pid} is gone: {error.strerror}") from error

    def ending(self) -> bool:
        """Return whether it has begun to end.

        The kernel sets this mark before it closes a process's files, and only then a driver
        frees what the process held: while it is not set, nothing has been freed by an end.
        """
        try:
            text = os.pread(self._stat, 4096, 0)
        except OSError:
            return True  # ESRCH: it is no more
        fields = text.rpartition(b")")[2].split()
        return len(fields) <= _FLAGS or bool(int(fields[_FLAGS]) & _EXITING)

    def close(self) -> None:
        """Forget it."""
        os.close(self._stat)
