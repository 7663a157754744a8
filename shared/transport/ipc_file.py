"""Unix socket files: a stale one is replaced, a live one never, nobody else gets in."""

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import ResourceMissing

_LONGEST_PATH = 107
_LOCK_TIMEOUT = 2.0
_BACKLOG = 128


def check_path(path: Path) -> None:
    """Raise ``ResourceMissing`` for a path the kernel cannot hold (``sun_path``, unix(7))."""
    length = len(os.fsencode(path))
    if length > _LONGEST_PATH:
        raise ResourceMissing(
            f"socket path {path} has {length} bytes, {_LONGEST_PATH} are possible: "
            "set a shorter `runtime_dir`"
        )


def listen(path: Path) -> tuple[int, int]:
    """Create the socket file, mode 0600, in a directory made 0700, and listen.

    A file whose owner died is replaced.

    Returns:
        The listening descriptor, which the caller owns, and the file's inode.

    Raises:
        ResourceMissing: path too long, a live owner, not a socket, or an unsafe directory.
    """
    check_path(path)
    try:
        _make_directory(path.parent)
        with _locked(path.parent), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            _remove_stale(path)
            listener.bind(str(path))
            inode = path.stat().st_ino
            path.chmod(0o600)
            listener.listen(_BACKLOG)
            return listener.detach(), inode
    except OSError as error:
        raise ResourceMissing(f"cannot listen on {path}: {error.strerror or error}") from error


def remove_own(path: Path, inode: int) -> None:
    """Remove the file unless it is gone or another socket took the name."""
    try:
        if path.stat().st_ino == inode:
            path.unlink()
    except FileNotFoundError:
        return


def _make_directory(directory: Path) -> None:
    missing = [p for p in (directory, *directory.parents) if not p.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
    for path in (directory, directory.parent):
        status = path.stat()
        foreign = status.st_uid not in (0, os.getuid())
        open_to_all = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
        if foreign or open_to_all:
            raise ResourceMissing(
                f"{path} can be changed by other users, so sockets in it are not safe: "
                "set another `runtime_dir`"
            )


def _remove_stale(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ResourceMissing(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        reason = probe.connect_ex(str(path))
    if reason not in (errno.ECONNREFUSED, errno.ENOENT):
        raise ResourceMissing(
            f"ipc://{path} is in use by a running process: stop it, or choose another "
            "`name` or `runtime_dir`"
        )
    path.unlink(missing_ok=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    # Two processes that start at once must not both find the file stale.
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + _LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ResourceMissing(f"{directory} stays locked by another start") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)
