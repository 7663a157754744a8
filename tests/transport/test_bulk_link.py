"""The `host` path on real sockets and real pools: every fault at every chunk, and the extremes."""

import asyncio
import queue
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from shared.config import SecuritySection
from shared.errors import ResourceMissing
from shared.fault_rules import ChunkFault, FaultsSection
from shared.ids import Incarnation, WorkerId
from shared.kv.arena import KvArena
from shared.kv.layout import KvDtype, KvLayout, LayerKv
from shared.messages.fleet import CodecRule
from shared.messages.prefill_decode import ArenaDescriptor
from shared.transport.bulk.fetches import Failed, FetchLimits
from shared.transport.bulk.reader import (
    Fetched,
    FetchJob,
    HostReader,
    Opened,
    Outcome,
    ReaderLimits,
)
from shared.transport.bulk.server import HostServer
from shared.transport.bulk.source_link import Peer
from shared.transport.security import generate_keys, security_for
from shared.units import Seconds
from shared.worker.events import SourceKey
from tests.conftest import RunAsync
from tests.transport.harness import Context

LAYOUT = KvLayout(dtype="bf16", block_size=4, layers=tuple(LayerKv(2, 8, 8) for _ in range(3)))
BLOCKS = 32
SOURCE = SourceKey(WorkerId("prefill-0"), Incarnation(7))
FAST = FetchLimits(slots=4, stall=0.2, attempts=4)
MENDING = replace(FAST, attempts=50)
"""Asks again soon, and does not give up because the machine is busy."""
CALM = replace(FAST, stall=15.0)
"""Asks for nothing again because the machine is busy."""
DEADLINE = 20.0
CHUNKS = 9  # of an 8-block job: 3 layers, 2 parts, 1,024 bytes a part, cut at 700


def fill(arena: KvArena, seed: int) -> None:
    dice = np.random.default_rng(seed)
    for layer in range(len(LAYOUT.layers)):
        for part in arena.raw(layer):
            part[:] = dice.integers(0, 256, part.shape, dtype=np.uint8)


class Ends:
    """A pool that is served and one that reads from it, each of ``dtypes``."""

    def __init__(
        self,
        context: Context,
        limits: FetchLimits = FAST,
        dtypes: tuple[KvDtype, KvDtype] = ("bf16", "bf16"),
        *,
        probe: float = 2.0,
    ) -> None:
        self.context = context
        layouts = [LAYOUT.with_dtype(dtype) for dtype in dtypes]
        self.source, self.target = (KvArena.create(layout, BLOCKS) for layout in layouts)
        fill(self.source, 1)
        fill(self.target, 2)
        self.server: HostServer | None = None
        self.codec: CodecRule = "none"
        self.outcomes: queue.SimpleQueue[Outcome[SourceKey]] = queue.SimpleQueue()
        self.reader: HostReader[SourceKey] = HostReader(
            context,
            self.target,
            ReaderLimits(chunk_bytes=700, probe=probe, fetch=limits),
            self.outcomes.put,
        )
        self._job = 0

    def serve(self, endpoint: str = "tcp://127.0.0.1:0", *faults: ChunkFault) -> str:
        self.server = HostServer(
            self.context,
            endpoint,
            self.source,
            worker="prefill-0",
            faults=FaultsSection(chunks=faults) if faults else None,
        )
        return self.server.endpoint

    def serve_lastingly(self) -> str:
        """Serve on a port that no dialling socket can be given while nobody listens there."""
        for port in random.sample(range(20_000, 32_000), 50):
            try:
                return self.serve(f"tcp://127.0.0.1:{port}")
            except ResourceMissing:
                continue
        raise AssertionError("no port is free")

    def serve_again(self, endpoint: str) -> None:
        """Serve where a server of this process was closed: libzmq lets go a moment later."""
        deadline = time.monotonic() + DEADLINE
        while True:
            try:
                self.serve(endpoint)
            except ResourceMissing:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            else:
                return

    def open(
        self,
        endpoint: str,
        arena: ArenaDescriptor | None = None,
        identity: bytes = b"decode-0#5",
    ) -> Opened[SourceKey]:
        arena_id = (arena or self.source.descriptor()).arena_id
        peer = Peer(
            endpoint=endpoint,
            arena=arena_id,
            identity=identity,
            codec=self.codec,
            layout=self.source.layout,
        )
        self.reader.open(SOURCE, peer)
        outcome = self.outcomes.get(timeout=DEADLINE)
        assert isinstance(outcome, Opened)
        return outcome

    def start(self, blocks: range = range(8), shift: int = 8, tokens: int = 0) -> int:
        self._job += 1
        self.reader.fetch(
            FetchJob(
                job=self._job,
                source=SOURCE,
                first_layer=0,
                end_layer=3,
                source_blocks=tuple(blocks),
                generations=tuple(int(self.source.generations[b]) for b in blocks),
                target_blocks=tuple((b + shift) % BLOCKS for b in blocks),
                tokens=tokens,
            )
        )
        return self._job

    def fetch(self, blocks: range = range(8), tokens: int = 0) -> Fetched | Failed:
        self.start(blocks, tokens=tokens)
        outcome = self.outcomes.get(timeout=DEADLINE)
        assert isinstance(outcome, Fetched | Failed)
        return outcome

    def fetch_used_anew(self) -> Outcome[SourceKey]:
        """Fetch eight blocks, one of which is given out again after its generation was told."""
        generations = tuple(int(g) for g in self.source.generations[:8])
        self.source.generations[3] += 1
        self.reader.fetch(
            FetchJob(
                job=9,
                source=SOURCE,
                first_layer=0,
                end_layer=3,
                source_blocks=tuple(range(8)),
                generations=generations,
                target_blocks=tuple(range(8, 16)),
            )
        )
        return self.outcomes.get(timeout=DEADLINE)

    def equal(self, blocks: range = range(8), shift: int = 8) -> bool:
        return all(
            np.array_equal(theirs[b], ours[(b + shift) % BLOCKS])
            for layer in range(3)
            for theirs, ours in zip(self.source.raw(layer), self.target.raw(layer), strict=True)
            for b in blocks
        )

    def close(self) -> None:
        self.reader.close()
        if self.server is not None:
            self.server.close()
        self.source.close()
        self.target.close()


@pytest.fixture
def ends(context: Context) -> Iterator[Ends]:
    pair = Ends(context)
    yield pair
    pair.close()


def test_a_job_arrives_whole_and_nothing_else_is_touched(context: Context) -> None:
    ends = Ends(context, CALM)
    before = [part.copy() for layer in range(3) for part in ends.target.raw(layer)]
    assert ends.open(ends.serve()).error is None
    outcome = ends.fetch()
    assert isinstance(outcome, Fetched) and outcome.again == 0
    assert outcome.bytes == 8 * LAYOUT.block_bytes
    assert ends.equal()
    after = [part for layer in range(3) for part in ends.target.raw(layer)]
    rest = [b for b in range(BLOCKS) if not 8 <= b < 16]
    assert all(np.array_equal(x[rest], y[rest]) for x, y in zip(before, after, strict=True))
    ends.close()


@pytest.mark.parametrize("sockets", [1, 3])
@pytest.mark.parametrize(
    "kind", ["delay", "drop", "duplicate", "reorder", "corrupt", "truncate", "stall"]
)
def test_every_fault_at_every_chunk_is_mended(run_async: RunAsync, kind: str, sockets: int) -> None:
    """Guards wrong bytes and hangs when chunk i is harmed (24, 29, 32, 36, 41), i = 0 ... last."""
    context: Context = zmq.Context()
    for chunk in range(CHUNKS):
        ends = Ends(context, replace(MENDING, sockets=sockets))
        fault = ChunkFault(kind=kind, chunk=chunk, delay=Seconds(0.05))  # type: ignore[arg-type]
        assert ends.open(ends.serve("tcp://127.0.0.1:0", fault)).error is None
        outcome = ends.fetch()
        assert isinstance(outcome, Fetched), outcome
        assert ends.equal(), f"{kind} at chunk {chunk} brought wrong bytes"
        assert outcome.spoiled == ends.reader.spoiled
        assert (ends.reader.spoiled == 1) == (kind in ("corrupt", "truncate"))
        ends.close()
    context.term()


@pytest.mark.parametrize(
    ("kind", "words"),
    [("corrupt", "wrong checksum"), ("truncate", "bytes"), ("drop", "missing"), ("stall", "s")],
)
def test_a_fault_without_end_is_a_named_error(ends: Ends, kind: str, words: str) -> None:
    """Guards endless retries; the next job over a mended link must work."""
    fault = ChunkFault(kind=kind, probability=1.0, delay=Seconds(60.0))  # type: ignore[arg-type]
    assert ends.open(ends.serve("tcp://127.0.0.1:0", fault)).error is None
    outcome = ends.fetch()
    assert isinstance(outcome, Failed)
    assert outcome.error.code == "transfer_failed" and outcome.error.retryable
    assert words in outcome.error.message


def test_blocks_that_were_used_anew_are_refused(ends: Ends) -> None:
    """Guards KV of another request under the old block number (32)."""
    assert ends.open(ends.serve()).error is None
    outcome = ends.fetch_used_anew()
    assert isinstance(outcome, Failed) and outcome.reused == 1


@pytest.mark.parametrize("sockets", [1, 3])
def test_a_window_of_one_and_many_jobs_at_once(context: Context, sockets: int) -> None:
    """Guards credits that get lost and jobs that starve (26)."""
    ends = Ends(context, replace(CALM, slots=1, sockets=sockets))
    assert ends.open(ends.serve()).error is None
    jobs = {ends.start(range(i, i + 4), shift=16) for i in range(0, 16, 4)}
    outcomes = [ends.outcomes.get(timeout=DEADLINE) for _ in jobs]
    assert all(isinstance(o, Fetched) and o.again == 0 for o in outcomes), outcomes
    assert ends.equal(range(16), shift=16)
    ends.close()


@pytest.mark.parametrize("sockets", [1, 3])
def test_the_peer_may_restart_at_the_same_address(context: Context, sockets: int) -> None:
    """Guards KV of the next life read with the handles of the former one (3, 14, 75)."""
    ends = Ends(context, replace(MENDING, sockets=sockets))
    endpoint = ends.serve_lastingly()
    assert ends.open(endpoint).error is None
    assert isinstance(ends.fetch(), Fetched)
    assert ends.server is not None
    ends.server.close()
    ends.start()
    former, ends.source = ends.source, KvArena.create(LAYOUT, BLOCKS)
    fill(ends.source, 3)
    ends.serve_again(endpoint)
    outcome = ends.outcomes.get(timeout=DEADLINE)
    assert isinstance(outcome, Failed) and "restarted" in outcome.error.message
    ends.reader.drop(SOURCE)
    refused = ends.open(endpoint, former.descriptor())
    assert refused.error is not None and "restarted" in refused.error.message
    assert ends.open(endpoint).error is None
    assert isinstance(ends.fetch(), Fetched) and ends.equal()
    former.close()
    ends.close()


@pytest.mark.parametrize("sockets", [1, 3])
def test_a_link_that_was_cut_is_dialled_again(context: Context, sockets: int) -> None:
    """Guards an agent that is never re-created after a disconnect (14, 15)."""
    ends = Ends(context, replace(MENDING, sockets=sockets))
    endpoint = ends.serve_lastingly()
    assert ends.open(endpoint).error is None
    assert ends.server is not None
    ends.server.close()
    ends.start()
    ends.serve_again(endpoint)
    outcome = ends.outcomes.get(timeout=DEADLINE)
    assert isinstance(outcome, Fetched) and ends.equal()
    ends.close()


def test_nobody_there_is_a_named_error_in_time(ends: Ends) -> None:
    """Guards a wait without end for a peer with a wrong address (5, 47)."""
    ends.serve("tcp://127.0.0.1:0")
    opened = ends.open("tcp://127.0.0.1:9")
    assert opened.error is not None and "tcp://127.0.0.1:9 did not answer" in opened.error.message
    outcome = ends.fetch()
    assert isinstance(outcome, Failed) and "not connected" in outcome.error.message


def test_garbage_is_counted_on_both_ends(ends: Ends) -> None:
    """Guards the two threads against frames of strangers (67)."""
    endpoint = ends.serve()
    stranger = ends.context.socket(zmq.DEALER)
    stranger.connect(endpoint)
    for frames in ([b""], [b"\xff" * 99], [b"\x80"], [b"a", b"b"]):
        stranger.send_multipart(frames)
    assert ends.open(endpoint).error is None
    assert isinstance(ends.fetch(), Fetched)
    assert ends.server is not None and ends.server.stats.rejected == 4
    stranger.close(linger=0)
    fake = ends.context.socket(zmq.ROUTER)
    fake.bind("tcp://127.0.0.1:0")
    address = fake.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
    ends.reader.drop(SOURCE)
    ends.reader.open(SOURCE, Peer(endpoint=address, arena=1, identity=b"decode-0#5"))
    peer, _ = fake.recv_multipart()
    for garbage in (b"", b"\xc1", b"\x81"):
        fake.send_multipart([peer, garbage])
    outcome = ends.outcomes.get(timeout=DEADLINE)
    assert isinstance(outcome, Opened) and outcome.error is not None
    assert ends.reader.rejected == 3
    fake.close(linger=0)


def test_keys_are_checked_and_encrypt(
    run_async: RunAsync, context: Context, directory: Path
) -> None:
    """Guards KV that anybody on the network may read (67)."""
    keys, others = SecuritySection(keys=str(generate_keys(directory / "keys"))), directory / "no"
    wrong = SecuritySection(keys=str(generate_keys(others)))

    async def check() -> None:
        ends = Ends(context)
        ends.server = HostServer(
            context,
            "tcp://127.0.0.1:0",
            ends.source,
            worker="prefill-0",
            security=security_for("tcp://127.0.0.1:0", keys, "bind"),
        )
        endpoint = ends.server.endpoint
        arena = ends.source.descriptor().arena_id
        for section, good in ((wrong, False), (SecuritySection(), False), (keys, True)):
            security = security_for(endpoint, section, "connect")
            peer = Peer(endpoint=endpoint, arena=arena, identity=b"d#1", security=security)
            ends.reader.open(SOURCE, peer)
            opened = await asyncio.to_thread(ends.outcomes.get, timeout=DEADLINE)
            assert isinstance(opened, Opened) and (opened.error is None) is good
        assert isinstance(await asyncio.to_thread(ends.fetch), Fetched) and ends.equal()
        ends.close()

    run_async(check())
