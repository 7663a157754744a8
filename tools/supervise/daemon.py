"""The supervisor process: supervisord, bound to the life of ``diptych up``.

Its configuration holds its own pid, so the parent writes that after the start and closes our
standard input as the sign that it lies there.
"""

import argparse
import os
import sys
from pathlib import Path

from supervisor import supervisord

from tools.parent import follow_parent
from tools.supervise.locks import clean, wait_for_services
from tools.supervise.plan import RunPaths

_KEPT_FD = 3
"""supervisord closes every inherited descriptor from 5 on."""


def main(argv: list[str] | None = None) -> None:
    """Run until SIGTERM or the parent's end, then stop the services in order and clean up."""
    parser = argparse.ArgumentParser(prog="python -m tools.supervise.daemon")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--lock-fd", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    given = parser.parse_args(argv)
    if not follow_parent(given.parent):
        return
    if given.lock_fd != _KEPT_FD:
        os.dup2(given.lock_fd, _KEPT_FD)
        os.close(given.lock_fd)
    sys.stdin.read()
    paths = RunPaths(root=given.run_dir)
    supervisord.main(["-n", "-c", str(paths.conf)])
    if os.getppid() != given.parent and wait_for_services(paths, 1.0):
        clean(paths)
        paths.up_lock.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
