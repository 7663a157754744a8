"""A process that owns an arena, for the tests of its readers.

``hold``: fill block b with the canary b + 1, print the descriptor, wait for end of input.
``churn N``: print the descriptor, then N times reallocate all blocks, fill each with its
generation and announce it, without waiting for any reader; then wait for end of input.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shared.kv.arena import KvArena
from shared.kv.block_pool import BlockPool
from shared.kv.layout import KvLayout, LayerKv
from shared.messages.prefill_decode import ArenaDescriptor

LAYOUT = KvLayout(
    dtype="fp32",
    block_size=4,
    layers=(LayerKv(2, 8, 4), LayerKv(2, 8, 4, shares=0), LayerKv(1, 16, 16)),
)
NUM_BLOCKS = 8
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def owner_process(mode: str, rounds: int = 0) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "tests.unit.kv_owner", mode, str(rounds)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def read_line(process: "subprocess.Popen[bytes]") -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def open_of(process: "subprocess.Popen[bytes]") -> KvArena:
    descriptor = msgspec.json.decode(read_line(process), type=ArenaDescriptor)
    return KvArena.open(descriptor, LAYOUT)


def say(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def fill(arena: KvArena, block: int, canary: float) -> None:
    for layer in range(len(arena.layout.layers)):
        arena.k(layer)[block] = canary
        arena.v(layer)[block] = -canary


def main(mode: str, rounds: int) -> None:
    arena = KvArena.create(LAYOUT, NUM_BLOCKS)
    pool = BlockPool(NUM_BLOCKS, LAYOUT.block_size, generations=arena.generations)
    say(arena.descriptor())
    if mode == "hold":
        for block in pool.allocate(NUM_BLOCKS):
            fill(arena, block, block + 1)
        say("filled")
    for _ in range(rounds):
        blocks = pool.allocate(NUM_BLOCKS)
        for block in blocks:
            fill(arena, block, pool.generation(block))
        say([(b, pool.generation(b)) for b in blocks])
        pool.release(blocks)
    if rounds:
        say("end")
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
