"""Peers on request: each requirement in a virtual environment of its own in the user's cache."""

import collections
import fcntl
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.status import Status

from shared.errors import ResourceMissing
from tools.bench.peers.peer import Peer

_PROBE_TIMEOUT = 180.0
_INSTALL_TIMEOUT = 3 * 3600.0
_KEPT_LINES = 8


def is_installed(peer: Peer) -> bool:
    """True if an installation of the pinned version has come to its end."""
    return peer.home is None or _marker(peer.home).is_file()


def require(peers: Iterable[Peer]) -> None:
    """Raise ``ResourceMissing`` naming the peers that are not installed."""
    missing = [peer.name for peer in peers if not is_installed(peer)]
    if missing:
        raise ResourceMissing(
            f"not installed: {', '.join(missing)}; "
            f"run `diptych bench compare --install --peers {','.join(missing)}`"
        )


def install(peer: Peer, console: Console) -> None:
    """Make the environment and let pip fill it; a second call finds it done.

    Raises:
        ResourceMissing: pip or the import check fails; with pip's words and the log's place.
    """
    home = peer.home
    if home is None or is_installed(peer):
        return
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_installed(peer):
            return
        log = home / "install.log"
        started = time.monotonic()
        with console.status(f"{peer.requirement}: starting") as status:
            _run([sys.executable, "-m", "venv", str(home)], log, status, peer)
            _run([peer.python, "-m", "pip", "install", str(peer.requirement)], log, status, peer)
            _drop_broken(peer, log, status)
            _check(peer, log)
        _marker(home).touch()
        minutes = (time.monotonic() - started) / 60
    console.print(f"{peer.requirement}: {home} ({minutes:.1f} min)", soft_wrap=True)


def _marker(home: Path) -> Path:
    return home / ".installed"


def _run(command: list[str], log: Path, status: Status, peer: Peer) -> None:
    last: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
    deadline = time.monotonic() + _INSTALL_TIMEOUT
    with (
        log.open("a") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if line.strip():
                last.append(line.strip())
                status.update(f"{peer.requirement}: {last[-1][:100]}")
            if time.monotonic() > deadline:
                process.kill()
    if process.returncode != 0:
        errors = [line for line in last if line.startswith("ERROR: ")] or list(last)[-1:]
        raise ResourceMissing(
            f"cannot install {peer.requirement}: {' '.join(errors)[:500]} (log: {log})"
        )


def _drop_broken(peer: Peer, log: Path, status: Status) -> None:
    for package in peer.removed_if_broken:
        if not _imports(peer, package, log):
            command = [peer.python, "-m", "pip", "uninstall", "--yes", package]
            _run(command, log, status, peer)


def _check(peer: Peer, log: Path) -> None:
    if not _imports(peer, peer.imports, log):
        raise ResourceMissing(
            f"{peer.requirement} is installed but cannot be imported (log: {log})"
        )


def _imports(peer: Peer, package: str, log: Path) -> bool:
    with log.open("a") as file:
        done = subprocess.run(
            [peer.python, "-c", f"import {package}"],
            stdout=file,
            stderr=file,
            check=False,
            timeout=_PROBE_TIMEOUT,
        )
    return done.returncode == 0
