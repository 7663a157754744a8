"""Processes that serve KV until a fault kills them, forked from one that has imported everything.

``python -m tests.transport.mortal_servers`` reads one line of JSON per process wanted and answers
each with one; all end with its standard input.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq
from msgspec import Struct

from shared.fault_rules import ChunkFault, FaultsSection
from shared.kv.arena import KvArena
from shared.kv.layout import KvLayout
from shared.messages.prefill_decode import ArenaDescriptor
from shared.transport.bulk.server import HostServer
from tests.transport.kv_filling import fill_normal


class Wanted(Struct, frozen=True, kw_only=True):
    """A pool filled from ``seed``, and a server that is killed at chunk ``kill``, or never."""

    layout: KvLayout
    blocks: int
    seed: int
    kill: int | None


class Served(Struct, frozen=True, kw_only=True):
    """Where it is."""

    pid: int
    endpoint: str
    arena: ArenaDescriptor


class Nursery:
    """The other end of this module's process."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def serve(self, wanted: Wanted) -> Served:
        """Fork one more server."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(wanted) + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=Served)


@contextmanager
def nursery() -> Iterator[Nursery]:
    """Run the process that forks."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.transport.mortal_servers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        yield Nursery(process)


def main() -> None:
    children = []
    for line in sys.stdin.buffer:
        wanted = msgspec.json.decode(line, type=Wanted)
        pid = os.fork()
        if pid == 0:
            _serve(wanted)
        children.append(pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _serve(wanted: Wanted) -> None:
    arena = KvArena.create(wanted.layout, wanted.blocks)
    fill_normal(arena, wanted.seed)
    kill = None if wanted.kill is None else ChunkFault(kind="kill", chunk=wanted.kill)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = HostServer(
        context,
        "tcp://127.0.0.1:0",
        arena,
        worker="prefill-0",
        faults=None if kill is None else FaultsSection(chunks=(kill,)),
    )
    served = Served(pid=os.getpid(), endpoint=server.endpoint, arena=arena.descriptor())
    print(msgspec.json.encode(served).decode(), flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
