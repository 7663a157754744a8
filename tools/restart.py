"""``diptych restart``: stop one service in order, start it again, wait until it is ready."""

import contextlib
import time

import msgspec
from rich.console import Console

from shared.config import Deployment
from shared.errors import NotFound, ResourceMissing
from tools.running import require_running
from tools.supervise.control import Control, ProcessState
from tools.supervise.observe import Ready
from tools.supervise.plan import STOP_MARGIN, RunPaths, run_paths

_POLL = 0.1


def restart(deployment: Deployment, service: str, console: Console, *, timeout: float) -> None:
    """Restart ``service`` of a running deployment.

    Raises:
        NotFound: there is no such service.
        ResourceMissing: the deployment does not run, or the service does not come back.
    """
    require_running(deployment)
    paths = run_paths(deployment)
    control = Control(paths.socket)
    before = _state(control, service)
    begun = time.monotonic()
    if before.pid:
        console.print(f"stopping {service} (pid {before.pid})")
        control.stop(before)
        _wait_stopped(control, service, deployment.router.drain_timeout + STOP_MARGIN + 5.0)
    control.start(before)
    after = _wait_ready(control, paths, service, timeout)
    seconds = time.monotonic() - begun
    console.print(f"{service} is ready again as pid {after.pid} after {seconds:.1f} s")


def _state(control: Control, service: str) -> ProcessState:
    states = control.states()
    try:
        return states[service]
    except KeyError:
        raise NotFound(f"there is no service `{service}`; there are: {', '.join(states)}") from None


def _wait_stopped(control: Control, service: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while _state(control, service).pid:
        if time.monotonic() >= deadline:
            raise ResourceMissing(f"{service} did not stop within {timeout:.0f} s")
        time.sleep(_POLL)


def _wait_ready(control: Control, paths: RunPaths, service: str, timeout: float) -> Ready:
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            ready = msgspec.json.decode(paths.ready(service).read_bytes(), type=Ready)
            if ready.pid == _state(control, service).pid:
                return ready
        if time.monotonic() >= deadline:
            raise ResourceMissing(
                f"{service} is not ready after {timeout:.0f} s; see {paths.log(service)}"
            )
        time.sleep(_POLL)
