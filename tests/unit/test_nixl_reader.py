"""Reading peers' pools by address, with a library that only pretends: it copies in this process."""

import asyncio
import ctypes
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shared.errors import TransferFailed
from shared.ids import Incarnation, WorkerId
from shared.kernels.kv_rows import from_rows, to_rows
from shared.kv.arena import HEADER_BYTES, KvArena, region_offsets
from shared.kv.layout import KvDtype, KvLayout, LayerKv
from shared.messages.prefill_decode import NixlDescriptor
from shared.transport.bulk.nixl import Hung, Piece
from shared.worker.effects import Copy
from shared.worker.events import Copied, CopyFailed, Event, SourceKey, SourceLost
from shared.worker.nixl_reader import NixlReader
from tests.conftest import RunAsync

LAYOUT = KvLayout(
    dtype="bf16",
    block_size=4,
    layers=(LayerKv(2, 8, 4), LayerKv(1, 4, 4), LayerKv(2, 8, 4, shares=0), LayerKv(2, 8, 8)),
)
SOURCE = SourceKey(WorkerId("prefill-0"), Incarnation(7))
BLOCKS = 12


class FakeEnd:
    """Reads this process's memory; ``before`` is called with the number of each read."""

    def __init__(self, staging: int, before: Callable[[int], None] = lambda number: None) -> None:
        self.staging: NDArray[np.uint8] = np.zeros(staging, dtype=np.uint8)
        self.reads = 0
        self.known: set[str] = set()
        self._before = before

    def meet(self, peer: NixlDescriptor) -> None:
        self.known.add(peer.agent)

    def forget(self, peer: NixlDescriptor) -> None:
        self.known.discard(peer.agent)

    def read(self, peer: NixlDescriptor, pieces: Sequence[Piece], seconds: float) -> None:
        assert peer.agent in self.known
        self.reads += 1
        self._before(self.reads - 1)
        ends = sorted((piece.at, piece.at + piece.size) for piece in pieces)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends))
        assert ends[-1][1] <= self.staging.size
        for piece in pieces:
            ctypes.memmove(self.staging.ctypes.data + piece.at, piece.address, piece.size)


class Stage:
    """A pool that is read, one that is written, and what is said about it."""

    def __init__(self, end: FakeEnd, dtype: KvDtype = "bf16") -> None:
        self.end = end
        self.source = KvArena.create(LAYOUT, BLOCKS)
        self.target = KvArena.create(LAYOUT.with_dtype(dtype), BLOCKS + 5)
        dice = np.random.default_rng(1)
        for arena in (self.source, self.target):
            for layer in range(len(LAYOUT.layers)):
                for part in arena.raw(layer):
                    part[:] = dice.integers(0, 256, part.shape, dtype=np.uint8)
        self.events: asyncio.Queue[Event | SourceKey] = asyncio.Queue()
        self.reader = NixlReader(
            end, self.target, self.events.put_nowait, seconds=1.0, met=self.events.put_nowait
        )

    async def next(self) -> Event | SourceKey:
        async with asyncio.timeout(20):
            return await self.events.get()

    async def meet(self, address: int | None = None) -> Event | SourceKey:
        nixl = NixlDescriptor(agent="p#7", metadata=b"", address=address or self.source.address)
        self.reader.meet(SOURCE, self.source.descriptor(), nixl)
        return await self.next()

    async def copy(self, source: tuple[int, ...], target: tuple[int, ...]) -> Event | SourceKey:
        self.reader.copy(
            Copy(
                job=3,
                source=SOURCE,
                first_layer=0,
                end_layer=4,
                source_blocks=source,
                generations=tuple(int(self.source.generations[b]) for b in source),
                target_blocks=target,  # type: ignore[arg-type]
            )
        )
        return await self.next()

    def close(self) -> None:
        self.reader.close()
        self.source.close()
        self.target.close()


def test_offsets_are_where_the_arena_has_its_layers() -> None:
    """Guards reads of a neighbour's bytes: a library that knows addresses checks nothing."""
    arena = KvArena.create(LAYOUT, BLOCKS)
    for layer, offsets in enumerate(region_offsets(LAYOUT, BLOCKS)):
        for part, offset in zip(arena.raw(layer), offsets, strict=True):
            assert part.ctypes.data == arena.address + offset
    assert arena.generations.ctypes.data == arena.address + HEADER_BYTES
    arena.close()


@pytest.mark.parametrize("staging", [HEADER_BYTES, HEADER_BYTES + 4096, 1 << 20])
def test_blocks_arrive_and_nothing_else_is_touched(run_async: RunAsync, staging: int) -> None:
    """Guards gaps, overlaps and strays where a job does not fit the buffer at once (36, 37)."""

    async def check() -> None:
        stage = Stage(FakeEnd(staging))
        assert await stage.meet() == SOURCE
        before = [part.copy() for layer in range(4) for part in stage.target.raw(layer)]
        source, target = (3, 4, 5, 9, 1, 11), (7, 8, 2, 3, 16, 15)
        copied = await stage.copy(source, target)
        size = len(source) * LAYOUT.block_bytes
        assert isinstance(copied, Copied) and copied.bytes == copied.wire_bytes == size
        rest = [b for b in range(BLOCKS + 5) if b not in target]
        after = [part for layer in range(4) for part in stage.target.raw(layer)]
        theirs = [part for layer in range(4) for part in stage.source.raw(layer)]
        for was, now, right in zip(before, after, theirs, strict=True):
            assert np.array_equal(now[list(target)], right[list(source)])
            assert np.array_equal(now[rest], was[rest])
        stage.close()
        assert not stage.end.known

    run_async(check())


@pytest.mark.parametrize("staging", [HEADER_BYTES, 1 << 20])
def test_blocks_of_another_dtype_are_converted(run_async: RunAsync, staging: int) -> None:
    """Guards bytes of bf16 taken for int8, where they come from the staging buffer."""

    async def check() -> None:
        stage = Stage(FakeEnd(staging), "int8")
        for layer in range(4):
            for pool in (stage.source.k(layer), stage.source.v(layer)):
                pool.copy_(torch.randn(pool.shape))
        assert await stage.meet() == SOURCE
        source, target = [3, 4, 5, 9, 1, 11], [7, 8, 2, 3, 16, 15]
        copied = await stage.copy(tuple(source), tuple(target))
        assert isinstance(copied, Copied) and copied.bytes == 6 * LAYOUT.block_bytes
        for layer in range(4):
            for name in ("k", "v"):
                theirs = getattr(stage.source, name)(layer)[source]
                ours = getattr(stage.target, name)(layer)[target]
                apart = from_rows(ours) - from_rows(to_rows(theirs, torch.int8))
                assert apart.abs().max() < 0.04  # one step: a fused product rounds ties otherwise
        stage.close()

    run_async(check())


def test_blocks_used_anew_while_they_are_read_never_reach_the_pool(run_async: RunAsync) -> None:
    """Guards KV of another request under the old block number (32), whenever it changes."""

    async def check(moment: int) -> None:
        def before(number: int) -> None:
            if number == moment:
                stage.source.generations[4] += 1

        stage = Stage(FakeEnd(1 << 20, before))
        assert await stage.meet() == SOURCE
        pool = [part.copy() for layer in range(4) for part in stage.target.raw(layer)]
        failed = await stage.copy((3, 4), (0, 1))
        assert isinstance(failed, CopyFailed) and failed.reused == 1
        now = [part for layer in range(4) for part in stage.target.raw(layer)]
        assert all(np.array_equal(x, y) for x, y in zip(pool, now, strict=True))
        assert isinstance(await stage.copy((3, 4), (0, 1)), Copied)
        stage.close()

    for moment in (1, 2):  # before the bytes, and between them and the generations
        run_async(check(moment))


@pytest.mark.parametrize("error", [Hung("hangs"), TransferFailed("disconnected"), OSError("no")])
def test_any_read_that_fails_is_a_named_failure(run_async: RunAsync, error: Exception) -> None:
    """Guards endless waits and half a job taken for a whole one, whichever read it is (1, 41)."""

    async def check(moment: int) -> None:
        def before(number: int) -> None:
            if number == moment:
                raise error

        stage = Stage(FakeEnd(HEADER_BYTES, before))
        met = await stage.meet()
        if moment == 0:
            assert isinstance(met, SourceLost) and str(error) in met.error.message
        else:
            failed = await stage.copy((3, 4), (0, 1))
            assert isinstance(failed, CopyFailed)
            assert failed.error.code == "transfer_failed" and str(error) in failed.error.message
            assert isinstance(await stage.copy((3, 4), (0, 1)), Copied)
        stage.close()

    for moment in range(3):
        run_async(check(moment))


def test_a_pool_that_is_not_the_one_announced_is_a_lost_source(run_async: RunAsync) -> None:
    """Guards another process's memory at the same address (3, 42, 75)."""

    async def check() -> None:
        stage = Stage(FakeEnd(1 << 20))
        other = KvArena.create(LAYOUT, BLOCKS)
        lost = await stage.meet(other.address)
        assert isinstance(lost, SourceLost) and "another one than announced" in lost.error.message
        failed = await stage.copy((1,), (1,))
        assert isinstance(failed, CopyFailed) and "not reachable" in failed.error.message
        other.close()
        stage.close()

    run_async(check())


def test_a_block_that_does_not_exist_is_never_read(run_async: RunAsync) -> None:
    """Guards reads outside the pool that a peer's table asks for."""

    async def check() -> None:
        stage = Stage(FakeEnd(1 << 20))
        assert await stage.meet() == SOURCE
        reads = stage.end.reads
        stage.reader.copy(
            Copy(
                job=3,
                source=SOURCE,
                first_layer=0,
                end_layer=4,
                source_blocks=(BLOCKS,),
                generations=(0,),
                target_blocks=(1,),  # type: ignore[arg-type]
            )
        )
        assert isinstance(await stage.next(), CopyFailed)
        assert stage.end.reads == reads
        stage.close()

    run_async(check())
