"""Locks that tell who runs: held by the kernel, gone with their process whatever ends it."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from shared.errors import ResourceMissing
from tools.supervise.plan import RunPaths

_POLL = 0.05
_PROBE_GRACE = 0.3
"""Seconds within which a mere look at the lock by somebody else is over."""


class Owner(Struct, frozen=True, kw_only=True):
    """Who holds a deployment; written into ``up.lock``."""

    pid: int
    config: str


class UpLock:
    """Exclusive right to run one deployment. ``fd`` may be passed on to the supervisor."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self.fd = fd

    @classmethod
    def acquire(cls, path: Path, owner: Owner, name: str) -> "UpLock":
        """Take the lock or raise ``ResourceMissing`` naming the process that has it."""
        deadline = time.monotonic() + _PROBE_GRACE
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if _try_lock(fd) and _same_file(fd, path):
                break
            os.close(fd)
            if time.monotonic() >= deadline:
                raise ResourceMissing(_held_sentence(path, name))
            time.sleep(_POLL)
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(owner), 0)
        return cls(path, fd)

    def release(self) -> None:
        """Remove the file and let go; a new holder then makes a new file."""
        self._path.unlink(missing_ok=True)
        os.close(self.fd)


def read_owner(path: Path) -> Owner | None:
    """Return who runs a deployment, None where nobody does."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if not _is_locked(path):
        return None
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(content, type=Owner)
    return None


def holders(path: Path) -> list[int]:
    """Return the processes that have a lock file open."""
    try:
        wanted = path.stat()
    except OSError:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for link in (entry / "fd").iterdir():
                with contextlib.suppress(OSError):
                    seen = link.stat()
                    if (seen.st_dev, seen.st_ino) == (wanted.st_dev, wanted.st_ino):
                        found.append(int(entry.name))
                        break
    return found


def wait_for_services(paths: RunPaths, timeout: float) -> bool:
    """Wait until no supervised process is left; False if some are after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while _is_locked(paths.services_lock):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL)
    return True


def clean(paths: RunPaths) -> None:
    """Remove what a finished or killed run left behind; logs stay."""
    for pattern in (
        "*.sock",
        "*.sock.*",
        "*.ready",
        "*.ready.*",
        "supervisor.*",
        "services.lock",
        "cores-*",
    ):
        for leftover in paths.root.glob(pattern):
            leftover.unlink(missing_ok=True)


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(fd)
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same_file(fd: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _held_sentence(path: Path, name: str) -> str:
    owner = read_owner(path)
    who = f" by pid {owner.pid} ({owner.config})" if owner is not None else ""
    return (
        f"deployment `{name}` is already run{who}; stop it there with Ctrl-C, "
        "or give this one another `name` and another port"
    )
