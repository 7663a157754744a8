"""Services as forks of one process that has imported torch: each start is 1.3 s of CPU cheaper.

A service's own code runs as it does under ``python -m``, down to the interpreter's end; only
``exec`` and the imports are left out. What is about those is started with ``subprocess`` alone.
"""

import ctypes
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_DEADLINE = 60.0
_MAX_ORDER = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36


class Nursery:
    """The process to fork, and the way to tell it so."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_DEADLINE)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.nursery"],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},  # read once, when torch is imported
                stdin=theirs,
            )

    def fork(self, module: str, arguments: Sequence[str], out: int, err: int) -> int:
        """Start a module with these descriptors as its outputs; return its pid, our child's."""
        order = {"parent": os.getpid(), "module": module, "arguments": list(arguments)}
        _adopt(True)
        try:
            socket.send_fds(self._control, [json.dumps(order).encode()], [out, err])
            pid = self._control.recv(32)
        finally:
            _adopt(False)
        if not pid:
            raise ChildProcessError("the nursery ended; stderr has its last words")
        return int(pid)

    def close(self) -> None:
        """End it; what it has forked goes on."""
        self._control.close()
        self._process.wait(_DEADLINE)


@cache
def nursery() -> Nursery:
    """The one of this test process."""
    return Nursery()


def kept() -> Iterator[Nursery]:
    """The body of a session's fixture: tests that fork leave nothing behind that was not there."""
    yield nursery()
    nursery().close()
    nursery.cache_clear()


class ForkedService(subprocess.Popen[bytes]):
    """``Popen`` of ``services.*`` whose process the nursery forks."""

    def __init__(self, module: str, *arguments: str, **io: Any) -> None:
        super().__init__([module, *arguments], **io)

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        pipes = rest[9:15]  # (read, write) of stdin, stdout and stderr; -1 where it is inherited
        out, err = pipes[3], pipes[5]
        try:
            self.pid = nursery().fork(
                args[0], args[1:], 1 if out == -1 else out, 2 if err == -1 else err
            )
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _adopt(orphans: bool) -> None:
    """Whether processes whose parent ends become this process's children."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0) != 0:
        raise OSError("cannot become the parent of what a nursery forks")


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for every order. Returns the order in a fork, and None at the end of all."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _MAX_ORDER, 2)
        if not data:
            return None
        middle = os.fork()
        if middle == 0:
            if os.fork() != 0:
                os._exit(0)  # so that its child becomes the orderer's
            order: dict[str, Any] = json.loads(data)
            while os.getppid() != order["parent"]:
                time.sleep(0.001)
            control.send(str(os.getpid()).encode())
            control.close()
            for number, descriptor in enumerate(descriptors, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            return order
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(middle, 0)


def main() -> None:
    """Import what workers import, then fork until the other end is closed."""
    import shared.worker.service  # noqa: F401

    control = socket.socket(fileno=os.dup(0))
    gc.collect()
    gc.freeze()
    order = _serve(control)
    if order is not None:
        sys.argv = [order["module"], *order["arguments"]]
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
