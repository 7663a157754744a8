"""Blocks given out anew and overwritten while many fetches read them, over real sockets."""

import queue
import random
import time
from collections import Counter, deque

import numpy as np
import pytest

from shared.ids import Incarnation, WorkerId
from shared.kv.arena import KvArena
from shared.transport.bulk.fetches import Failed, FetchLimits
from shared.transport.bulk.reader import (
    Fetched,
    FetchJob,
    HostReader,
    Opened,
    Outcome,
    ReaderLimits,
)
from shared.transport.bulk.source_link import Peer
from shared.worker.events import SourceKey
from tests.transport.churning_source import (
    BLOCKS,
    CANARY,
    LAYOUT,
    PER_JOB,
    Announced,
    churning_source,
    fill,
    stamp,
)
from tests.transport.harness import Context

SOURCE = SourceKey(WorkerId("prefill-0"), Incarnation(7))
AT_ONCE = 8
ENOUGH = 50
DEADLINE = 40.0
Reader = HostReader[SourceKey]


class Fetcher:
    """Keeps fetches of the newest announcements open, and compares what is said to have come."""

    def __init__(
        self, reader: Reader, target: KvArena, outcomes: "queue.SimpleQueue[Outcome[SourceKey]]"
    ) -> None:
        self._reader = reader
        self._target = target
        self._outcomes = outcomes
        self._open: dict[int, tuple[Announced, tuple[int, ...]]] = {}
        self._free = [tuple(range(i, i + PER_JOB)) for i in range(0, AT_ONCE * PER_JOB, PER_JOB)]
        self._dice = random.Random(2)
        self._job = 0
        self.seen: Counter[str] = Counter()

    def start(self, announced: Announced) -> None:
        target = self._free.pop()
        for block in target:
            fill(self._target, block, 0)
        self._job += 1
        self._open[self._job] = announced, target
        self._reader.fetch(
            FetchJob(
                job=self._job,
                source=SOURCE,
                first_layer=0,
                end_layer=len(LAYOUT.layers),
                source_blocks=announced.blocks,
                generations=announced.generations,
                target_blocks=target,
            )
        )

    def run(self, newest: "deque[Announced]", deadline: float) -> None:
        while min(self.seen["arrived"], self.seen["refused"]) < ENOUGH:
            assert time.monotonic() < deadline, f"too little happened: {self.seen}"
            while self._free:
                self.start(self._dice.choice(list(newest)))
            self.take()
        while self._open:
            self.take()

    def take(self) -> None:
        outcome = self._outcomes.get(timeout=DEADLINE)
        assert isinstance(outcome, Fetched | Failed)
        announced, target = self._open.pop(outcome.job)
        self._free.append(target)
        if isinstance(outcome, Failed):
            assert outcome.error.retryable
            self.seen["refused"] += 1
            return
        self.seen["arrived"] += 1
        for theirs, generation, ours in zip(
            announced.blocks, announced.generations, target, strict=True
        ):
            right = stamp(theirs, generation)
            for layer in range(len(LAYOUT.layers)):
                for part in self._target.raw(layer):
                    words = part[ours].view(np.uint64)
                    assert not (words == CANARY).any(), "a canary was taken for KV"
                    assert (words == right).all(), "KV of another life of the block"


@pytest.mark.parametrize("sockets", [1, 3])
def test_no_canary_is_ever_accepted(context: Context, sockets: int) -> None:
    """Guards KV of whoever got the block next: in the pool, in libzmq's queue, on the wire (32).

    The bytes leave without a copy, so libzmq sends what a block holds when it gets to it. The
    owner waits for nobody: many fetches have to be refused, and those that are not must be right.
    """
    limits = FetchLimits(slots=16, stall=2.0, sockets=sockets)
    outcomes: queue.SimpleQueue[Outcome[SourceKey]] = queue.SimpleQueue()
    target = KvArena.create(LAYOUT, BLOCKS)
    reader: Reader = HostReader(
        context, target, ReaderLimits(chunk_bytes=128 << 10, fetch=limits), outcomes.put
    )
    try:
        with churning_source() as (served, newest):
            arena = served.arena.arena_id
            reader.open(SOURCE, Peer(endpoint=served.endpoint, arena=arena, identity=b"decode-0#5"))
            opened = outcomes.get(timeout=DEADLINE)
            assert isinstance(opened, Opened) and opened.error is None
            Fetcher(reader, target, outcomes).run(newest, time.monotonic() + DEADLINE)
    finally:
        reader.close()
        target.close()
