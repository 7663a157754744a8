"""One process at a time, by a lock that the kernel drops with its holder."""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_POLL: Final = 0.2


class LockTimeout(Exception):
    """Another process held the lock all the time."""


@contextmanager
def file_lock(
    path: Path, timeout: float, on_wait: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; ``timeout`` in seconds, ``on_wait`` once if it is taken.

    Raises:
        LockTimeout: the time is up.
        OSError: the file cannot be made.
    """
    deadline = time.monotonic() + timeout
    waiting = False
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LockTimeout(str(path)) from None
                if on_wait is not None and not waiting:
                    on_wait()
                waiting = True
                time.sleep(_POLL)
        yield
