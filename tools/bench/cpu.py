"""CPU time of the control processes during a measurement."""

import contextlib
import time

import msgspec

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
    try:
        return sum(time.clock_gettime(_clock_of(pid)) for pid in pids)
    except OSError:
        return None


def own_cpu_seconds() -> float:
    """Return this process's user + system time."""
    return time.process_time()


def _clock_of(pid: int) -> int:
    """Return Linux's CPU clock of a process (clock_getcpuclockid, CPUCLOCK_SCHED).

    It counts nanoseconds; /proc/PID/stat counts ticks of 10 ms, in which a short load is none.
    """
    return ~pid << 3 | 2
