"""A process that serves KV out of blocks it keeps giving out anew, without waiting for any reader.

``python -m tests.transport.churning_source`` prints where it is, then a line of JSON for each
hand-over it announces, and ends with its standard input. A block that was given back is
overwritten with ``CANARY`` as soon as it is given out again, then with its ``stamp``.
"""

import random
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import zmq
from msgspec import Struct

from shared.ids import BlockId
from shared.kv.arena import KvArena
from shared.kv.block_pool import BlockPool
from shared.kv.layout import KvLayout, LayerKv
from shared.messages.prefill_decode import ArenaDescriptor
from shared.transport.bulk.server import HostServer

# K and V of a block have 64 KiB each: they leave without a copy, whenever libzmq gets to it.
LAYOUT = KvLayout(dtype="bf16", block_size=16, layers=(LayerKv(8, 256, 256),) * 2)
BLOCKS = 64
PER_JOB = 4
HELD = 10
CANARY = 0xCACACACACACACACA


class Served(Struct, frozen=True, kw_only=True):
    """Where it is."""

    endpoint: str
    arena: ArenaDescriptor


class Announced(Struct, frozen=True, array_like=True):
    """Blocks whose bytes are their stamps as long as they have these generations."""

    blocks: tuple[int, ...]
    generations: tuple[int, ...]


def stamp(block: int, generation: int) -> int:
    """Return the word that fills a block in one of its lives."""
    return generation << 16 | block


def fill(arena: KvArena, block: int, word: int) -> None:
    """Fill a block in all layers."""
    for layer in range(len(arena.layout.layers)):
        for part in arena.raw(layer):
            part[block].view(np.uint64)[:] = word


@contextmanager
def churning_source() -> Iterator[tuple[Served, deque[Announced]]]:
    """Run one; yield where it is, and its newest announcements, of which there is one at least."""
    newest: deque[Announced] = deque(maxlen=HELD)
    command = [sys.executable, "-m", "tests.transport.churning_source"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        served = msgspec.json.decode(process.stdout.readline(), type=Served)
        lines = (msgspec.json.decode(line, type=Announced) for line in process.stdout)
        newest.append(next(lines))
        listener = threading.Thread(target=newest.extend, args=(lines,))
        listener.start()
        try:
            yield served, newest
        finally:
            process.stdin.close()
            listener.join()


def main() -> None:
    arena = KvArena.create(LAYOUT, BLOCKS)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = HostServer(context, "tcp://127.0.0.1:0", arena, worker="prefill-0")
    _say(Served(endpoint=server.endpoint, arena=arena.descriptor()))
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    _churn(arena, ended)
    server.close()
    context.term()
    arena.close()


def _churn(arena: KvArena, ended: threading.Event) -> None:
    pool = BlockPool(BLOCKS, LAYOUT.block_size, generations=arena.generations, prefix_cache=False)
    leases: deque[list[BlockId]] = deque()
    dice = random.Random(1)
    while not ended.is_set():
        if len(leases) == HELD:
            pool.release(leases.popleft())
        blocks = pool.allocate(PER_JOB)
        for block in blocks:
            fill(arena, block, CANARY)
        ended.wait(dice.random() * 0.001)
        for block in blocks:
            fill(arena, block, stamp(block, pool.generation(block)))
        leases.append(blocks)
        generations = tuple(int(pool.generation(block)) for block in blocks)
        try:
            _say(Announced(tuple(blocks), generations))
        except BrokenPipeError:
            return
        ended.wait(min(0.05, dice.expovariate(200)))


def _say(message: Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
