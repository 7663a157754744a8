"""CPU time of the control processes during a measurement."""

import contextlib
import os

import msgspec
import psutil

from shared.config import Deployment
from tools.supervise.observe import Ready
from tools.supervise.plan import run_paths

CONTROL = ("router", "gateway")


def control_pids(deployment: Deployment) -> list[int]:
    """Return the processes of router and gateway, empty unless both are ready on this machine."""
    paths = run_paths(deployment)
    pids = []
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        for name in CONTROL:
            pids.append(msgspec.json.decode(paths.ready(name).read_bytes(), type=Ready).pid)
    return pids if len(pids) == len(CONTROL) else []


def cpu_seconds(pids: list[int]) -> float | None:
    """Return user + system time of all of them, None if one is gone or there are none."""
    if not pids:
        return None
    total = 0.0
    try:
        for pid in pids:
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    except psutil.Error:
        return None
    return total


def own_cpu_seconds() -> float:
    """Return this process's user + system time."""
    times = os.times()
    return times.user + times.system
