"""One run of a deployment: its supervisor process from start to the last file removed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil

from shared.config import Deployment
from shared.errors import ResourceMissing
from tools.supervise.control import Control
from tools.supervise.locks import Owner, UpLock, clean, holders, wait_for_services
from tools.supervise.observe import Ready
from tools.supervise.plan import STOP_MARGIN, RunPaths, processes, render_conf, run_paths

_SUPERVISOR_START = 10.0
_WAKE_TIMEOUT = 1.0
_POLL = 0.05


class Run:
    """A started deployment. ``close`` is always called, however the run ends."""

    def __init__(
        self, deployment: Deployment, paths: RunPaths, lock: UpLock, daemon: subprocess.Popen[bytes]
    ) -> None:
        self._deployment = deployment
        self._lock = lock
        self._daemon = daemon
        self.paths = paths
        self.control = Control(paths.socket)
        self._waker = Control(paths.socket, timeout=_WAKE_TIMEOUT)
        self.names = [process.name for process in processes(deployment)]

    @classmethod
    def start(cls, deployment: Deployment, config: Path, lock: UpLock) -> "Run":
        """Start supervisor and services. The caller holds the lock and has checked the machine.

        Raises:
            ResourceMissing: the supervisor does not come up.
        """
        paths = run_paths(deployment)
        paths.logs.mkdir(mode=0o700, exist_ok=True)
        with paths.log("supervisor").open("ab") as log:
            daemon = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "tools.supervise.daemon"),
                    *("--parent", str(os.getpid()), "--lock-fd", str(lock.fd)),
                    *("--run-dir", str(paths.root)),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(lock.fd,),
                start_new_session=True,
            )
        conf = render_conf(deployment, config, paths, parent=daemon.pid, directory=Path.cwd())
        _write_private(paths.conf, conf)
        assert daemon.stdin is not None
        daemon.stdin.close()
        run = cls(deployment, paths, lock, daemon)
        try:
            run._wait_for_supervisor()
        except ResourceMissing:
            run.kill()
            run.close()
            raise
        return run

    @property
    def alive(self) -> bool:
        """True while the supervisor process lives."""
        return self._daemon.poll() is None

    def ready(self) -> dict[str, Ready]:
        """Read the ready files that are there."""
        found = {}
        for name in self.names:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                found[name] = msgspec.json.decode(self.paths.ready(name).read_bytes(), type=Ready)
        return found

    def services_alive(self) -> bool:
        """True while a service process lives."""
        return bool(holders(self.paths.services_lock))

    def terminate(self) -> None:
        """Begin the orderly stop: gateway, router, workers; each drains."""
        if self.alive:
            self._daemon.terminate()

    def stop_limit(self) -> float:
        """Return the longest an orderly stop may take, in seconds: three groups in a row."""
        return 3 * (self._deployment.router.drain_timeout + STOP_MARGIN)

    def stopped(self) -> bool:
        """True once the supervisor and every service are gone.

        Asking also wakes the supervisor, which else looks after its children once a second.
        """
        if self.alive:
            with contextlib.suppress(ResourceMissing):
                self._waker.states()
        return not self.alive and wait_for_services(self.paths, 0.0)

    def kill(self) -> None:
        """End everything at once."""
        for pid in holders(self.paths.services_lock):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(self._daemon.pid).children(recursive=True)
                self._daemon.kill()
                for child in children:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
        self._daemon.wait(timeout=10)

    def close(self) -> None:
        """Remove the run's files and give the deployment's name back."""
        wait_for_services(self.paths, 5.0)
        clean(self.paths)
        self._lock.release()

    def _wait_for_supervisor(self) -> None:
        deadline = time.monotonic() + _SUPERVISOR_START
        while True:
            if not self.alive:
                raise ResourceMissing(
                    f"the supervisor ended at its start; see {self.paths.log('supervisor')}"
                )
            try:
                self.control.states()
            except ResourceMissing:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL)
            else:
                return


def claim(deployment: Deployment, config: Path) -> UpLock:
    """Take the deployment for this process, after any earlier run of it is fully gone.

    Raises:
        ResourceMissing: it runs elsewhere, or processes of an earlier run do not end.
    """
    paths = run_paths(deployment)
    try:
        paths.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = UpLock.acquire(
            paths.up_lock, Owner(pid=os.getpid(), config=str(config)), deployment.name
        )
    except OSError as error:
        raise ResourceMissing(f"cannot use the run directory {paths.root}: {error}") from error
    try:
        _require_gone(deployment, paths)
    except BaseException:
        lock.release()
        raise
    clean(paths)
    return lock


def _require_gone(deployment: Deployment, paths: RunPaths) -> None:
    limit = deployment.router.drain_timeout + STOP_MARGIN
    if not wait_for_services(paths, limit):
        pids = holders(paths.services_lock)
        raise ResourceMissing(
            f"processes of an earlier run of `{deployment.name}` do not end; "
            f"stop them with: kill -9 {' '.join(map(str, pids))}"
        )
    stranger = _started_by_hand(deployment, paths)
    if stranger is not None:
        raise ResourceMissing(stranger)


def _started_by_hand(deployment: Deployment, paths: RunPaths) -> str | None:
    for process in processes(deployment):
        try:
            ready = msgspec.json.decode(paths.ready(process.name).read_bytes(), type=Ready)
            command = psutil.Process(ready.pid).cmdline()
        except (OSError, msgspec.MsgspecError, psutil.Error):
            continue
        if process.module in command:
            return (
                f"`{process.name}` of deployment `{deployment.name}` already runs by itself "
                f"(pid {ready.pid}); stop it with: kill {ready.pid}"
            )
    return None


def _write_private(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
