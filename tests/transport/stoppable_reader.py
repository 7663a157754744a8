"""A process that fetches KV again and again until it is told enough, and may be stopped meanwhile.

``python -m tests.transport.stoppable_reader ENDPOINT ARENA`` prints a line when it is connected and
one for each fetch that arrived intact, and ends with its standard input.
"""

import queue
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import zmq

from shared.kv.arena import KvArena
from shared.kv.layout import KvLayout, LayerKv
from shared.transport.bulk.fetches import FetchLimits
from shared.transport.bulk.reader import (
    Fetched,
    FetchJob,
    HostReader,
    Opened,
    Outcome,
    ReaderLimits,
)
from shared.transport.bulk.source_link import Peer

# 16 KiB of K or V a block, and never two neighbours: each chunk is copied by its sender.
LAYOUT: Final = KvLayout(dtype="bf16", block_size=16, layers=(LayerKv(4, 128, 128),) * 4)
BLOCKS: Final = 128
PER_JOB: Final = 32
CHUNK: Final = 128 << 10
CHUNKS: Final = 32
"""Of a job: 32 blocks of 128 KiB."""
LIMITS: Final = FetchLimits(slots=8, stall=5.0)
DEADLINE: Final = 30.0


class Reading:
    """A reader of its own, one fetch after the other."""

    def __init__(self, endpoint: str, arena: int, name: str) -> None:
        self._outcomes: queue.SimpleQueue[Outcome[str]] = queue.SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._target = KvArena.create(LAYOUT, PER_JOB)
        limits = ReaderLimits(chunk_bytes=CHUNK, fetch=LIMITS)
        self._reader: HostReader[str] = HostReader(
            self._context, self._target, limits, self._outcomes.put
        )
        self._dice = random.Random(name)
        self._job = 0
        self._reader.open("source", Peer(endpoint=endpoint, arena=arena, identity=name.encode()))
        opened = self._outcomes.get(timeout=DEADLINE)
        assert isinstance(opened, Opened) and opened.error is None, opened

    def fetch(self) -> Fetched:
        """Fetch scattered blocks and compare them with what they must hold."""
        self._job += 1
        blocks = tuple(self._dice.sample(range(0, BLOCKS, 2), PER_JOB))
        self._reader.fetch(
            FetchJob(
                job=self._job,
                source="source",
                first_layer=0,
                end_layer=len(LAYOUT.layers),
                source_blocks=blocks,
                generations=(0,) * PER_JOB,
                target_blocks=tuple(range(PER_JOB)),
            )
        )
        outcome = self._outcomes.get(timeout=DEADLINE)
        assert isinstance(outcome, Fetched), outcome
        for layer in range(len(LAYOUT.layers)):
            for part in self._target.raw(layer):
                words = part.view(np.uint64)
                assert (words == np.array(blocks, dtype=np.uint64)[:, None]).all()
        return outcome

    def close(self) -> None:
        """End the thread and give the memory back."""
        self._reader.close()
        self._context.term()
        self._target.close()


@contextmanager
def stoppable_reader(endpoint: str, arena: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Run one until the block is left; it is connected."""
    module = "tests.transport.stoppable_reader"
    command = [sys.executable, "-m", module, endpoint, str(arena)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"connected\n"
        try:
            yield process
        finally:
            process.kill()


def main() -> None:
    reading = Reading(sys.argv[1], int(sys.argv[2]), "decode-9#1")
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    print("connected", flush=True)
    while not ended.is_set():
        print(reading.fetch().job, flush=True)
    reading.close()


if __name__ == "__main__":
    main()
