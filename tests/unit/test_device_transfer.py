"""KV between GPUs' memory: what is trusted and when, by which path, and how it ends.

CUDA is a stand-in here; ``tests/gpu`` has the real one.
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shared.device.cuda_pool import CudaPool
from shared.device.owner import Owner
from shared.fault_rules import CopyFault, FaultsSection
from shared.ids import Incarnation, WorkerId
from shared.messages.fleet import PathReason
from shared.worker.events import Copied, CopyFailed, PathChosen, SourceKey, SourceLost
from shared.worker.paths import CodecTerms
from tests.unit.device_pair import SOURCE, Kind, Pair, cuda_pool, fill, paired, raw
from tests.unit.fake_cupy import FakeRuntime

RunAsync = Callable[..., None]


@pytest.mark.parametrize("source_gpu", [0, 1])
def test_blocks_come_by_cuda_ipc_byte_for_byte(
    run_async: RunAsync, tmp_path: Path, source_gpu: int
) -> None:
    """Two processes on one GPU, and on two."""

    async def check(pair: Pair) -> None:
        pair.open()
        pair.copy(1)
        assert await pair.next() == PathChosen(SOURCE, "ipc", "self_test")
        copied = await pair.next()
        assert isinstance(copied, Copied) and copied.job == 1
        assert copied.bytes == 3 * pair.source.layout.block_bytes
        assert pair.arrived()
        pair.movers.close_source(SOURCE)

    paired(run_async, partial(Pair, tmp_path, source_gpu=source_gpu), check)


@pytest.mark.parametrize("path", ["auto", "host"])
def test_blocks_used_anew_while_they_are_copied_are_discarded(
    run_async: RunAsync, tmp_path: Path, path: str
) -> None:
    """Generations read before the copy's event are those announced, whatever was copied (32).

    The stand-in copies when the event is asked for. The owner gives the block away at that moment.
    """

    async def check(pair: Pair) -> None:
        pair.open(path=path)  # type: ignore[arg-type]
        assert isinstance(await pair.next(), PathChosen)
        runtime = pair.ours if path == "auto" else pair.theirs

        def reuse() -> None:
            pair.source.generations[2] += np.uint64(1)

        runtime.on_copy = reuse
        pair.copy(1)
        failed = await pair.next()
        assert isinstance(failed, CopyFailed) and failed.reused == 1
        runtime.on_copy = lambda: None

    paired(run_async, partial(Pair, tmp_path), check)


def test_kv_of_a_process_that_ends_meanwhile_is_discarded(
    run_async: RunAsync, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process's memory may be somebody else's, and its generations stay as they are."""

    async def check(pair: Pair) -> None:
        pair.open()
        assert isinstance(await pair.next(), PathChosen)
        monkeypatch.setattr(Owner, "ending", lambda self: bool(pair.ours.copies > 3))
        pair.copy(1)
        failed = await pair.next()
        assert isinstance(failed, CopyFailed) and failed.error.retryable
        assert "ended while its KV was copied" in failed.error.message

    paired(run_async, partial(Pair, tmp_path), check)


def test_an_owner_ends_once_and_its_pid_is_not_taken_for_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        owner = Owner(child.pid)
        assert not owner.ending()
        child.kill()
        child.wait()
        assert owner.ending()
        owner.close()


def test_an_orderly_end_takes_every_block_back(run_async: RunAsync, tmp_path: Path) -> None:
    """CUDA frees the memory before the process ends: the generations must say so before."""
    pool = cuda_pool(FakeRuntime())
    before = pool.generations.copy()
    seen = pool.generations
    pool.close()
    assert (seen != before).all()
    pool.arena.close()


@pytest.mark.parametrize(
    ("function", "status", "reason"),
    [
        ("ipcOpenMemHandle", 201, "cannot_map"),
        ("ipcOpenMemHandle", 801, "cannot_map"),
        ("ipcOpenMemHandle", 217, "no_peer_access"),
    ],
)
def test_refused_cuda_ipc_falls_back_to_host_by_name(
    run_async: RunAsync,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    function: str,
    status: int,
    reason: PathReason,
) -> None:
    """Containers, namespaces and platforms without CUDA IPC; nobody is to find out by the speed."""

    async def check(pair: Pair) -> None:
        pair.ours.fails[function] = status
        pair.open()
        pair.copy(1)
        assert await pair.next() == PathChosen(SOURCE, "host", reason, "configured")
        assert isinstance(await pair.next(), Copied)
        assert pair.arrived()

    paired(run_async, partial(Pair, tmp_path), check)
    assert f"{reason}: " in caplog.text and "KV comes by host" in caplog.text


@pytest.mark.parametrize(
    ("source", "target", "sliced", "reason"),
    [
        ("cuda", "cpu", False, "mixed_memory"),
        ("cpu", "cuda", False, "mixed_memory"),
        ("cuda", "cuda", True, "mig"),
    ],
)
def test_memory_that_cannot_be_shared_is_not_even_tried(
    run_async: RunAsync,
    tmp_path: Path,
    source: Kind,
    target: Kind,
    sliced: bool,
    reason: PathReason,
) -> None:
    """Mixed pairs have the same bytes per block: they move over sockets."""

    async def check(pair: Pair) -> None:
        pair.open()
        pair.copy(1)
        assert await pair.next() == PathChosen(SOURCE, "host", reason, "configured")
        assert isinstance(await pair.next(), Copied)
        assert pair.arrived()
        pair.open(key=SourceKey(WorkerId("prefill-1"), Incarnation(1)), path="ipc")
        lost = await pair.next()
        assert isinstance(lost, SourceLost) and "does not work here" in lost.error.message

    paired(run_async, partial(Pair, tmp_path, source, target, sliced=sliced), check)


def test_two_gpus_without_peer_access_are_told_apart_from_refused_ipc(
    run_async: RunAsync, tmp_path: Path
) -> None:
    async def check(pair: Pair) -> None:
        pair.ours.no_peers = True
        pair.open()
        assert await pair.next() == PathChosen(SOURCE, "host", "no_peer_access", "configured")

    paired(run_async, partial(Pair, tmp_path, source_gpu=1), check)


def test_a_gpu_that_exports_nothing_is_read_by_host(run_async: RunAsync, tmp_path: Path) -> None:
    async def check(pair: Pair) -> None:
        pair.open(arena=pair.with_cuda(handle=None))
        assert await pair.next() == PathChosen(SOURCE, "host", "cannot_map", "configured")

    paired(run_async, partial(Pair, tmp_path), check)


def test_ipc_asked_for_by_name_has_no_fallback(run_async: RunAsync, tmp_path: Path) -> None:
    async def check(pair: Pair) -> None:
        pair.ours.fails["ipcOpenMemHandle"] = 801
        pair.open(path="ipc")
        lost = await pair.next()
        assert isinstance(lost, SourceLost) and "`ipc: host`" in lost.error.message

    paired(run_async, partial(Pair, tmp_path), check)


def test_memory_other_than_announced_is_not_read(run_async: RunAsync, tmp_path: Path) -> None:
    """A restarted owner, or an old handle: the canary is another, or the book is."""

    async def check(pair: Pair) -> None:
        stranger = cuda_pool(pair.theirs)
        pair.open(arena=pair.with_cuda(handle=stranger.cuda.handle), bulk=False)
        lost = await pair.next()
        assert isinstance(lost, SourceLost) and "another arena" in lost.error.message
        other = msgspec.structs.replace(pair.descriptor, arena_id=5)
        pair.open(arena=other, bulk=False)
        lost = await pair.next()
        assert isinstance(lost, SourceLost) and "another one than announced" in lost.error.message
        assert not pair.ours.mapped
        stranger.close()
        stranger.arena.close()

    paired(run_async, partial(Pair, tmp_path), check)


def test_copies_between_gpus_that_bring_nothing_fail_the_self_test(
    run_async: RunAsync, tmp_path: Path
) -> None:
    """Misconfigured platforms do this; what the last self-test left in the page must not help."""

    async def check(pair: Pair) -> None:
        pair.open()
        assert isinstance(await pair.next(), PathChosen)
        pair.movers.close_source(SOURCE)
        assert isinstance(pair.source, CudaPool)
        queue, theirs = pair.ours.memcpyAsync, pair.source.address

        def lose(target: int, source: int, *rest: int) -> None:
            if source != theirs:
                queue(target, source, *rest)

        pair.ours.memcpyAsync = lose  # type: ignore[method-assign]
        pair.open()
        chosen = await pair.next()
        assert chosen == PathChosen(SOURCE, "host", "cannot_map", "configured")

    paired(run_async, partial(Pair, tmp_path), check)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"layout": "0" * 32}, "another layout"), ({"size": 4096}, "not this model's layout")],
)
def test_another_layout_is_refused_before_anything_is_mapped(
    run_async: RunAsync, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    async def check(pair: Pair) -> None:
        pair.ours.fails["ipcOpenMemHandle"] = 999
        pair.open(arena=pair.with_cuda(**changes))
        lost = await pair.next()
        assert isinstance(lost, SourceLost) and words in lost.error.message

    paired(run_async, partial(Pair, tmp_path), check)


def test_a_handle_opened_twice_stays_open_until_both_are_done(
    run_async: RunAsync, tmp_path: Path
) -> None:
    """CUDA gives the same address again and counts: to unmap it at once would pull it away."""
    again = SourceKey(WorkerId("prefill-0"), Incarnation(8))

    async def check(pair: Pair) -> None:
        pair.open()
        pair.open(key=again)
        assert isinstance(await pair.next(), PathChosen)
        assert isinstance(await pair.next(), PathChosen)
        assert list(pair.ours.mapped.values()) == [2]
        pair.movers.close_source(SOURCE)
        pair.copy(1, key=again)
        assert isinstance(await pair.next(), Copied)
        assert list(pair.ours.mapped.values()) == [1]
        assert pair.arrived()
        pair.copy(2)
        failed = await pair.next()
        assert isinstance(failed, CopyFailed) and failed.job == 2

    paired(run_async, partial(Pair, tmp_path), check)


def test_a_copy_that_cuda_refuses_waits_for_what_was_queued(
    run_async: RunAsync, tmp_path: Path
) -> None:
    """Its blocks are given out again with the answer: nothing may write there afterwards."""

    async def check(pair: Pair) -> None:
        pair.open()
        assert isinstance(await pair.next(), PathChosen)
        queue, taken = pair.ours.memcpyAsync, iter((True, True, False))

        def second(*args: int) -> None:
            if not next(taken):
                pair.ours.fails["memcpyAsync"] = 1
            queue(*args)

        pair.ours.memcpyAsync = second  # type: ignore[method-assign]
        pair.copy(1)
        failed = await pair.next()
        assert isinstance(failed, CopyFailed) and "copies no KV" in failed.error.message
        assert not any(pair.ours.streams.values()), "copies are still queued"

    paired(run_async, partial(Pair, tmp_path), check)


@pytest.mark.parametrize("how", ["hung", "failed"])
@pytest.mark.parametrize("path", ["auto", "host"])
def test_a_device_whose_copies_do_not_end_is_given_up(
    run_async: RunAsync, tmp_path: Path, how: str, path: str
) -> None:
    """No answer, since the blocks may be written at any time; and not without a word."""

    async def check(pair: Pair) -> None:
        pair.open(path=path)  # type: ignore[arg-type]
        assert isinstance(await pair.next(), PathChosen)
        pair.ours.hung = how == "hung"
        if how == "failed":
            pair.ours.fails["eventQuery"] = 700
        pair.copy(1)
        error = await asyncio.to_thread(pair.lost.get, timeout=20)
        assert "has failed" in error.message
        pair.movers.close()
        assert pair.events.empty()
        pair.ours.hung = False

    paired(run_async, partial(Pair, tmp_path), check)


@pytest.mark.parametrize(("kind", "words"), [("fail", "injected"), ("stale", "used 1 blocks anew")])
def test_harm_to_a_copy_is_a_named_failure(
    run_async: RunAsync, tmp_path: Path, kind: str, words: str
) -> None:
    async def check(pair: Pair) -> None:
        pair.open()
        assert isinstance(await pair.next(), PathChosen)
        pair.copy(1)
        pair.copy(2)
        failed = await pair.next()
        assert isinstance(failed, CopyFailed) and words in failed.error.message
        assert isinstance(await pair.next(), Copied)
        assert pair.arrived()

    faults = FaultsSection(copies=(CopyFault(kind=kind, copy=0),))  # type: ignore[arg-type]
    paired(run_async, partial(Pair, tmp_path, faults=faults), check)


def test_a_codec_that_nobody_asked_for_is_not_used(run_async: RunAsync, tmp_path: Path) -> None:
    """Codecs compute on the CPU: a welcome that names one must not reach a GPU's memory."""

    async def check(pair: Pair) -> None:
        pair.open(terms=CodecTerms("int8", "configured"))
        pair.copy(1)
        assert await pair.next() == PathChosen(SOURCE, "host", "mixed_memory", "declined")
        copied = await pair.next()
        assert isinstance(copied, Copied) and copied.codec == "none"
        assert pair.arrived()

    paired(run_async, partial(Pair, tmp_path, "cpu"), check)


def test_one_slab_is_enough_and_no_more_are_used(run_async: RunAsync, tmp_path: Path) -> None:
    """Guards a sender that waits for ever for a slab, or takes memory without a bound."""

    async def check(pair: Pair) -> None:
        pair.open(path="host")
        assert isinstance(await pair.next(), PathChosen)
        for job in range(20):
            pair.copy(job)
        for _ in range(20):
            assert isinstance(await pair.next(), Copied)
        assert pair.arrived()
        assert len(pair.theirs.pinned) == 1

    paired(run_async, partial(Pair, tmp_path, slabs=1), check)


def test_filling_differs_by_seed() -> None:
    """The comparisons above rest on it."""
    pools = [cuda_pool(FakeRuntime()) for _ in range(2)]
    for seed, pool in enumerate(pools):
        fill(pool, seed)
    assert not np.array_equal(raw(pools[0], 0)[0], raw(pools[1], 0)[0])
    for pool in pools:
        pool.close()
        pool.arena.close()
