"""Chunks out of a GPU's memory and into another's: every byte, every order of blocks, few slabs."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.device.cuda_pool import CudaPool
from shared.device.cuda_stage import LANDING_SLABS, CudaLand, CudaLift
from shared.errors import ResourceMissing, TransferFailed
from shared.kv.layout import KvDtype, KvLayout, LayerKv
from shared.transport.bulk.plan import plan_chunks
from tests.unit.device_pair import LAYOUT, cuda_pool, fill, raw
from tests.unit.fake_cupy import FakeCudaError, FakeRuntime

dims = st.integers(1, 9)
layers = st.lists(st.builds(LayerKv, st.integers(1, 3), dims, dims), min_size=1, max_size=3)
dtypes: st.SearchStrategy[KvDtype] = st.sampled_from(["fp32", "bf16", "fp16", "fp8"])


def layout_of(dtype: KvDtype, block_size: int, own: list[LayerKv]) -> KvLayout:
    if dtype == "fp8":  # takes heads of a multiple of 4
        own = [LayerKv(kv.heads, 4 * kv.k_dim, 4 * kv.v_dim) for kv in own]
    return KvLayout(dtype=dtype, block_size=block_size, layers=tuple(own))


layouts = st.builds(layout_of, dtypes, st.integers(1, 5), layers)


@settings(max_examples=60, deadline=None)
@given(
    layout=layouts,
    pairs=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), min_size=1, max_size=12),
    chunk_bytes=st.integers(16, 2048),
    slab=st.integers(8, 1024),
    count=st.integers(1, 5),
)
def test_every_byte_arrives_whatever_the_layout_and_the_slabs(
    layout: KvLayout, pairs: list[tuple[int, int]], chunk_bytes: int, slab: int, count: int
) -> None:
    """Against the pool's bytes themselves: runs, borders of slabs, slabs filled while in use."""
    blocks = {ours: theirs for theirs, ours in pairs}  # a target block is written once
    source = cuda_pool(FakeRuntime(), blocks=12, layout=layout)
    target = cuda_pool(FakeRuntime(), blocks=12, layout=layout)
    fill(source, 3)
    out, into = CudaLift(source, count, slab), CudaLand(target, slab)
    everything = range(len(layout.layers))
    for chunk in plan_chunks(layout, everything, len(blocks), chunk_bytes):
        frames = out.lift(chunk, tuple(blocks.values())).frames()
        assert sum(len(frame) for frame in frames) == chunk.size
        into.land(chunk, tuple(blocks), [frames[0][:5], frames[0][5:]])
        frames.clear()
    into.settle()
    untouched = [block for block in range(12) if block not in blocks]
    for layer in everything:
        for theirs, ours in zip(raw(source, layer), raw(target, layer), strict=True):
            assert np.array_equal(ours[list(blocks)], theirs[list(blocks.values())])
            assert not ours[untouched].any()
    for stage, pool in ((out, source), (into, target)):
        stage.close()
        pool.close()
        pool.arena.close()


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def pool(runtime: FakeRuntime) -> Iterator[CudaPool]:
    made = cuda_pool(runtime)
    fill(made, 1)
    yield made
    made.close()
    made.arena.close()


def test_the_next_chunk_is_copied_while_one_is_waited_for(
    pool: CudaPool, runtime: FakeRuntime
) -> None:
    """Guards a wire that waits for each copy, and a wait for more than one's own chunk."""
    stage = CudaLift(pool, 2, 512)
    first, second, *_ = plan_chunks(pool.layout, range(2), 3, 512)
    ahead = [stage.lift(chunk, (1, 2, 3)) for chunk in (first, second)]
    queued = sum(map(len, runtime.streams.values()))
    frames = ahead[0].frames()
    left = sum(map(len, runtime.streams.values()))
    assert 0 < left < queued, "the second chunk's copies are still queued"
    after = bytes(ahead[1].frames()[0])
    assert not any(runtime.streams.values())
    ahead.clear()
    assert [bytes(frames[0]), after] == [
        bytes(stage.lift(chunk, (1, 2, 3)).frames()[0]) for chunk in (first, second)
    ]
    stage.close()


def test_a_chunk_that_is_not_wanted_any_more_is_waited_for(
    pool: CudaPool, runtime: FakeRuntime
) -> None:
    """Its memory goes: a copy that is done later would write anywhere."""
    stage = CudaLift(pool, 1, 16)
    chunk = plan_chunks(pool.layout, range(2), 3, 4096)[0]
    lifted = stage.lift(chunk, (1, 2, 3))
    assert any(runtime.streams.values())
    lifted.drop()
    assert not any(runtime.streams.values())
    del lifted
    assert stage.room
    stage.close()


def test_a_slab_is_not_used_again_while_a_frame_is_on_its_way(pool: CudaPool) -> None:
    """libzmq reads a frame when it likes: until then its bytes are those of its checksum."""
    stage = CudaLift(pool, 2, 512)
    first, second, *_ = plan_chunks(pool.layout, range(2), 3, 512)
    one = stage.lift(first, (1, 2, 3)).frames()
    kept = bytes(one[0])
    other = stage.lift(second, (1, 2, 3)).frames()
    assert not stage.room
    assert bytes(one[0]) == kept
    part = one[0][3:7]  # as a frame cut by a fault
    del one
    assert not stage.room
    del part
    assert stage.room
    again = stage.lift(second, (1, 2, 3)).frames()
    assert bytes(again[0]) == bytes(other[0])
    stage.close()


def test_pinned_memory_outlives_its_stage_as_long_as_its_frames(
    pool: CudaPool, runtime: FakeRuntime
) -> None:
    """libzmq still holds frames when the worker ends."""
    stage = CudaLift(pool, 2, 512)
    chunk = plan_chunks(pool.layout, range(2), 3, 512)[0]
    frames = stage.lift(chunk, (1, 2, 3)).frames()
    stage.close()
    del stage
    assert runtime.pinned and len(bytes(frames[0])) == chunk.size
    frames.clear()
    assert not runtime.pinned


def test_a_chunk_larger_than_a_slab_counts_as_one(pool: CudaPool, runtime: FakeRuntime) -> None:
    """A reader may be configured for larger chunks than its source."""
    stage, into = CudaLift(pool, 1, 16), CudaLand(pool, 16)
    chunk = plan_chunks(pool.layout, range(2), 3, 4096)[0]
    frames = stage.lift(chunk, (1, 2, 3)).frames()
    assert not stage.room
    into.land(chunk, (5, 6, 7), frames)
    frames.clear()
    assert stage.room
    assert not any(runtime.streams.values()), "its memory is gone and copies are queued"
    assert np.array_equal(raw(pool, 0)[0][[5, 6, 7]], raw(pool, 0)[0][[1, 2, 3]])
    stage.close()
    into.close()


def test_landing_takes_few_slabs_whatever_comes(pool: CudaPool, runtime: FakeRuntime) -> None:
    into, out = CudaLand(pool, 256), CudaLift(pool, 1, 256)
    assert not runtime.pinned, "nothing is pinned before it is needed"
    chunks = plan_chunks(LAYOUT, range(2), 8, 256)
    assert len(chunks) > 2 * LANDING_SLABS
    for chunk in chunks:
        frames = out.lift(chunk, range(8)).frames()
        into.land(chunk, range(8), frames)
        frames.clear()
    into.settle()
    sizes = [len(memory) for memory in runtime.pinned.values()]
    assert sorted(sizes) == [256, LANDING_SLABS * 256]
    into.close()
    out.close()


def test_memory_that_cannot_be_pinned_says_what_to_lower(
    pool: CudaPool, runtime: FakeRuntime
) -> None:
    runtime.fails["hostAlloc"] = 2
    stage = CudaLift(pool, 64, 512 << 10)
    with pytest.raises(ResourceMissing, match=r"transfer\.window"):
        stage.lift(plan_chunks(LAYOUT, range(2), 3, 512)[0], (1, 2, 3)).frames()
    assert stage.room
    stage.close()


@pytest.mark.parametrize("size", [16, 4096])
def test_a_copy_that_cuda_refuses_leaves_nothing_queued(
    pool: CudaPool, runtime: FakeRuntime, size: int
) -> None:
    """The frame's memory goes with the error: a copy that is done later would write anywhere."""
    out, into = CudaLift(pool, 1, size), CudaLand(pool, size)
    chunk = plan_chunks(pool.layout, range(2), 3, 4096)[0]
    frames = out.lift(chunk, (1, 3, 5)).frames()
    queue = runtime.memcpyAsync
    taken = iter((True, False, True, False))

    def refuse(*arguments: int) -> None:
        if not next(taken):
            raise FakeCudaError(1, "invalid value")
        queue(*arguments)

    runtime.memcpyAsync = refuse  # type: ignore[method-assign]
    with pytest.raises(TransferFailed):
        into.land(chunk, (2, 4, 6), frames)
    into.settle()
    frames.clear()
    with pytest.raises(TransferFailed):
        out.lift(chunk, (1, 3, 5)).frames()
    assert out.room and not any(runtime.streams.values())
    out.close()
    into.close()
