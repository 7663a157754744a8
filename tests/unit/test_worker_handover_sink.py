"""The decode side of the hand-over: nothing is decoded that was not announced and verified."""

from collections.abc import Callable

import msgspec
import pytest

from shared.ids import TransferId
from shared.messages.prefill_decode import (
    AbortTransfer,
    Acknowledge,
    KvReady,
    OpenTransfer,
    PeerHello,
    ReadyBlocks,
    RenewLeases,
    TransferGone,
)
from shared.messages.router_worker import TransferLost
from shared.worker.effects import ConnectSource, Copy, MapArena, ToSource
from shared.worker.events import Copied, CopyFailed
from tests.unit.worker_bench import (
    ARENA,
    SOURCE,
    Bench,
    complete,
    error,
    request,
)

T = TransferId(70)


def receiving(prompt: int = 10, **limits: object) -> Bench:
    """Return a worker that has greeted its source and waits for KV of dispatch 1."""
    bench = Bench(**limits)  # type: ignore[arg-type]
    bench.expect(1, request(prompt))
    bench.welcome()
    return bench


def lost(bench: Bench) -> TransferLost:
    """Return the one loss the last event reported."""
    (message,) = [m for m in bench.to_router() if isinstance(m, TransferLost)]
    return message


def test_a_hand_over_from_expect_to_the_second_token() -> None:
    """Guards the whole regular path, effect by effect."""
    bench = Bench()
    connect, hello = bench.expect(1, request(10))
    assert connect == ConnectSource(SOURCE, "ipc:///tmp/kv-prefill-9")
    assert isinstance(hello, ToSource) and isinstance(hello.message, PeerHello)
    assert bench.welcome() == [MapArena(SOURCE, ARENA), ToSource(SOURCE, OpenTransfer(transfer=T))]
    assert bench.empty(), "blocks are taken when there is something to put into them"
    bench.ready(8, layers=1)
    (job,) = bench.all(Copy)
    assert (job.first_layer, job.end_layer) == (0, 1)
    assert (job.source_blocks, job.generations, job.target_blocks) == ((20, 21), (1, 1), (0, 1))
    bench.copied()
    bench.ready(8, layers=2)
    (job,) = bench.all(Copy)
    assert (job.first_layer, job.end_layer) == (1, 2)
    bench.copied()
    bench.ready(10)
    (job,) = bench.all(Copy)
    assert (job.first_layer, job.end_layer, job.source_blocks) == (0, 2, (22,))
    bench.complete(10, token=60)
    assert bench.to_source() == [] and bench.to_router() == []
    bench.now = 3.0
    bench.event(Copied(job.job, 1, 0.0))
    assert bench.to_source() == [Acknowledge(transfer=T)]
    assert [(t.index, t.token) for t in bench.output().tokens] == [(0, 60)]
    assert bench.work() == [(10, 1, True)]
    assert bench.running is not None
    assert bench.running.batch.opened[0].output_ids == (60,)
    bench.step(token=61)
    assert [(t.index, t.token) for t in bench.output().tokens] == [(1, 61)]
    assert bench.counters().transfers_ok == 1


def test_the_finished_request_reports_when_its_kv_came_and_what_was_cached() -> None:
    bench = receiving(4)
    bench.ready(4)
    bench.copied()
    bench.now = 2.0
    bench.source(msgspec.structs.replace(complete(4), num_cached_tokens=3))
    while bench.running is not None:
        bench.now += 1.0
        bench.step()
    finished = bench.finished()
    assert finished.num_cached_tokens == 3
    times = finished.times
    assert (times.accepted, times.transferred, times.stepped, times.finished) == (0, 2, 3, 9)
    assert bench.empty() and bench.state.idle


def test_token_1_that_ended_the_request_ends_it_here_without_kv() -> None:
    bench = receiving()
    bench.source(msgspec.structs.replace(complete(10), finished=True))
    assert bench.finished().reason == "length"
    assert [(t.index, t.token) for t in bench.output().tokens] == [(0, 5)]
    assert bench.to_source() == [Acknowledge(transfer=T)]
    assert bench.empty() and bench.state.idle


def test_blocks_in_the_own_prefix_cache_are_not_copied_again() -> None:
    bench = Bench()
    bench.run(9, request(8, max_tokens=1))
    bench.step()
    bench.expect(1, request(10))
    bench.welcome()
    bench.ready(10)
    (job,) = bench.all(Copy)
    assert job.source_blocks == (22,)
    bench.copied()
    bench.complete(10)
    assert bench.work() == [(10, 1, True)]


def test_received_blocks_serve_the_next_prompt() -> None:
    bench = receiving(8)
    bench.ready(8)
    bench.copied()
    bench.complete(8)
    bench.step()
    bench.run(2, request(9, max_tokens=1))
    bench.step()
    assert bench.work()[-1] == (8, 1, True)


def ready(first: int, count: int, layers: tuple[int, int], blocks: tuple[int, ...]) -> KvReady:
    """Return an announcement with a block table."""
    return KvReady(
        transfer=T,
        first_token=first,
        num_tokens=count,
        first_layer=layers[0],
        end_layer=layers[1],
        table=ReadyBlocks(blocks, tuple(1 for _ in blocks)),
    )


BROKEN: dict[str, Callable[[Bench], object]] = {
    "a gap in tokens": lambda b: b.source(ready(8, 2, (0, 2), (20, 21, 22))),
    "more tokens than there are": lambda b: b.source(ready(4, 7, (0, 2), (20, 21, 22))),
    "no tokens": lambda b: b.source(ready(4, 0, (0, 2), (20, 21, 22))),
    "a negative position": lambda b: b.source(ready(-4, 4, (0, 2), (20, 21, 22))),
    "more layers than there are": lambda b: b.source(ready(0, 4, (0, 3), (20,))),
    "no layers": lambda b: b.source(ready(0, 4, (1, 1), (20,))),
    "a changed table": lambda b: b.source(ready(4, 4, (0, 2), (25, 21))),
    "a malformed table": lambda b: b.source(
        msgspec.structs.replace(ready(4, 4, (0, 2), ()), table=ReadyBlocks((20, 21), (1,)))
    ),
    "another generation": lambda b: b.source(
        msgspec.structs.replace(ready(4, 4, (0, 2), ()), table=ReadyBlocks((20, 21), (2, 1)))
    ),
    "a table too short": lambda b: b.source(ready(4, 6, (0, 2), (20, 21))),
    "an end before the end": lambda b: b.complete(10),
    "KV of another length": lambda b: b.complete(4),
    "another token than the first": lambda b: b.source(
        msgspec.structs.replace(complete(10), index=3)
    ),
    "a negative token": lambda b: b.source(
        msgspec.structs.replace(complete(10), first_token_id=-3)
    ),
    "a token outside the vocabulary": lambda b: b.source(
        msgspec.structs.replace(complete(10), first_token_id=1000)
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_announcements_that_do_not_fit_together_void_the_transfer(what: str) -> None:
    """Guards truncated, late or reordered KV that is decoded all the same (29, 34)."""
    bench = receiving()
    bench.ready(4)
    (job,) = bench.all(Copy)
    BROKEN[what](bench)
    message = lost(bench)
    assert (message.dispatch, message.transfer) == (1, 70)
    assert message.error.code == "transfer_failed" and message.error.retryable
    assert bench.to_source() == [AbortTransfer(transfer=T)]
    assert bench.running is None
    assert not bench.empty(), "the copy thread still writes to the blocks"
    bench.event(Copied(job.job, 1, 0.0))
    assert bench.empty() and bench.running is None
    bench.complete(10)
    assert bench.running is None
    assert bench.counters().transfers_failed == 1


def test_an_end_of_another_length_voids_kv_that_was_announced_to_its_end() -> None:
    """Guards the KV of another prompt, taken for this one's because enough of it came (34)."""
    bench = receiving()
    bench.ready(10)
    jobs = bench.all(Copy)
    bench.complete(9)
    assert "KV of 9 tokens, not 10" in lost(bench).error.message
    for job in jobs:
        bench.event(Copied(job.job, 1, 0.0))
    assert bench.empty() and bench.running is None


def test_repeated_announcements_change_nothing() -> None:
    bench = receiving()
    bench.ready(8)
    bench.copied()
    assert bench.ready(8) == []
    assert bench.ready(4) == []


def test_blocks_used_anew_while_they_were_copied_are_never_decoded() -> None:
    """Guards another request's KV in this one's answer (scenario 32)."""
    bench = receiving()
    bench.ready(10)
    (job,) = bench.all(Copy)
    bench.complete(10)
    bench.event(CopyFailed(job.job, error("transfer_failed"), reused=1, again=3, spoiled=2))
    assert lost(bench).transfer == 70
    assert bench.running is None and bench.empty()
    report = bench.report()
    assert (report.counters.generation_mismatches, report.counters.chunks_again) == (1, 3)
    (pair,) = report.pairs
    assert (pair.failed, pair.generation_mismatches, pair.chunks_again) == (1, 1, 3)
    assert (pair.chunks_spoiled, pair.bytes) == (2, 0)


@pytest.mark.parametrize("moment", ["expecting", "copying", "copied", "lost"])
def test_a_cancel_at_any_moment_gives_every_block_back_and_tells_the_source(moment: str) -> None:
    """Guards KV pinned on both sides by a client that left (scenarios 19, 21, 27)."""
    bench = receiving()
    jobs: list[Copy] = []
    if moment != "expecting":
        bench.ready(8)
        jobs = bench.all(Copy)
    if moment == "copied":
        bench.copied()
        jobs = []
    if moment == "lost":
        bench.source(TransferGone(transfer=T, error=error()))
    bench.cancel(1)
    assert bench.to_source() == ([] if moment == "lost" else [AbortTransfer(transfer=T)])
    assert bench.to_router() == []
    for job in jobs:
        bench.event(Copied(job.job, 1, 0.0))
    assert bench.empty() and bench.state.idle
    bench.ready(10)
    bench.complete(10)
    assert bench.to_router() == [] and bench.state.idle


def test_without_free_blocks_a_transfer_waits_and_keeps_its_lease() -> None:
    """Guards against failing, spinning or losing KV under memory pressure (scenarios 26, 53)."""
    bench = Bench(blocks=4)
    bench.run(9, request(tuple(range(14)), max_tokens=2))
    bench.expect(1, request(10))
    bench.welcome()
    bench.ready(10)
    bench.complete(10)
    assert bench.all(Copy) == [] and bench.state.load().waiting == 1
    bench.tick(5.0)
    assert RenewLeases(transfers=(T,)) in bench.to_source()
    bench.tick(31.0)
    assert [m for m in bench.to_router() if isinstance(m, TransferLost)] == []
    while bench.running is not None and not bench.all(Copy):
        bench.step()
    bench.copied()
    assert bench.work() == [(10, 1, True)]


def test_a_running_sequence_takes_the_blocks_of_a_younger_transfer_which_starts_over() -> None:
    """Guards the deadlock of running sequences and parked loads (scenario 53)."""
    bench = Bench(blocks=9)
    bench.run(9, request(tuple(range(7)), max_tokens=30))
    bench.expect(1, request(9))
    bench.welcome()
    bench.ready(8)
    jobs = bench.all(Copy)
    assert len(jobs) == 1
    while bench.state.load().receiving:
        bench.step()
    assert bench.state.load().waiting == 1
    for job in jobs:
        bench.event(Copied(job.job, 1, 0.0))
    while not bench.all(Copy):
        bench.step()
    bench.copied()
    bench.ready(9)
    bench.copied()
    bench.complete(9)
    assert (9, 1, True) in bench.work()
