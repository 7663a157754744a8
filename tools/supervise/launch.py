"""Become one service: own log file, share of the run's lock, death with the supervisor.

Run as a script, with the standard library only, so that the moments before the kernel knows
what to do when the supervisor dies are few.
"""

import ctypes
import fcntl
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """``launch.py PARENT LOCK LOG COMMAND...``: replace this process by COMMAND.

    The lock file descriptor stays open in the service, so the kernel itself tells whether any
    process of a run is alive, whatever killed the rest.
    """
    parent, lock, log, *command = argv
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        return
    held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(held, fcntl.LOCK_SH)
    os.set_inheritable(held, True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
