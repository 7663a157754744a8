"""The decode side of the hand-over: sources that die, restart, refuse, stall or move."""

import msgspec

from shared.errors import ErrorPayload
from shared.ids import DispatchId, Incarnation, TransferId, WorkerId
from shared.messages.prefill_decode import (
    AbortTransfer,
    FromDecode,
    KvReady,
    OpenTransfer,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    ReadyBlocks,
    RenewLeases,
    ToDecode,
    TransferGone,
)
from shared.messages.router_worker import Expect, NewSource, Run, TransferLost
from shared.worker.effects import CloseSource, ConnectSource, Copy, MapArena
from shared.worker.events import Copied, SourceKey, SourceLost
from tests.unit.worker_bench import (
    ARENA,
    SOURCE,
    Bench,
    complete,
    error,
    kv_source,
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


def test_a_dead_source_is_reported_at_once_and_another_one_takes_over() -> None:
    """Guards a slot pinned by a dead peer until some time-out (scenarios 1, 2, 6)."""
    bench = receiving()
    bench.ready(8)
    (job,) = bench.all(Copy)
    bench.event(SourceLost(SOURCE, error("transfer_failed")))
    assert lost(bench).dispatch == 1
    assert bench.all(CloseSource) == [CloseSource(SOURCE)]
    assert bench.to_source() == []
    again = SourceKey(SOURCE.worker, Incarnation(45))
    bench.said(NewSource(dispatch=DispatchId(1), source=kv_source(71, again)))
    assert [e.source for e in bench.all(ConnectSource)] == [again]
    bench.source(
        PeerWelcome(worker=again.worker, incarnation=again.incarnation, arena=ARENA), key=again
    )
    bench.event(Copied(job.job, 1, 0.0))
    bench.source(
        msgspec.structs.replace(ready(0, 10, (0, 2), (30, 31, 32)), transfer=TransferId(71)),
        key=again,
    )
    (job,) = bench.all(Copy)
    assert job.source_blocks == (30, 31, 32) and job.source == again
    bench.copied()
    bench.source(complete(10, transfer=71), key=again)
    assert bench.work() == [(10, 1, True)]


def test_a_new_source_while_the_old_one_still_sends_starts_over() -> None:
    bench = receiving()
    bench.ready(8)
    (old,) = bench.all(Copy)
    bench.said(NewSource(dispatch=DispatchId(1), source=kv_source(71)))
    assert bench.to_source() == [
        AbortTransfer(transfer=T),
        OpenTransfer(transfer=TransferId(71)),
    ]
    bench.ready(10)
    assert bench.all(Copy) == [], "what the old transfer says is late"
    bench.ready(10, transfer=71)
    (job,) = bench.all(Copy)
    assert not set(job.target_blocks) & set(old.target_blocks), "the old copy is still running"
    bench.event(Copied(old.job, 1, 0.0))
    bench.event(Copied(job.job, 1, 0.0))
    bench.complete(10, transfer=71)
    assert bench.work() == [(10, 1, True)]


def test_a_local_run_replaces_a_waiting_expect() -> None:
    """Guards a request whose prefill workers are all gone (scenario 16)."""
    bench = receiving()
    bench.ready(8)
    jobs = bench.all(Copy)
    bench.said(Run(dispatch=DispatchId(1), request=request(7)))
    assert bench.to_source() == [AbortTransfer(transfer=T)]
    assert bench.work() == [(0, 7, True)]
    bench.event(Copied(jobs[0].job, 1, 0.0))
    bench.step()
    assert [(t.index, t.token) for t in bench.output().tokens] == [(0, 50)]


def test_a_new_source_for_a_sequence_that_decodes_already_is_told_that_it_is_not_needed() -> None:
    """Guards a second prefill that would hold its KV for nobody."""
    bench = receiving(4)
    bench.ready(4)
    bench.copied()
    bench.complete(4)
    bench.said(NewSource(dispatch=DispatchId(1), source=kv_source(71)))
    assert bench.to_source() == [AbortTransfer(transfer=TransferId(71))]
    assert bench.work() == [(4, 1, True)]


def test_a_refused_expect_frees_the_prefill_at_once() -> None:
    """Guards KV that prefill holds for a request decode will never run (scenario 20)."""
    bench = Bench()
    bench.expect(1, request((1, -1)))
    assert bench.failed().error.code == "invalid_request"
    assert bench.to_source()[-1] == AbortTransfer(transfer=T)


def test_a_source_that_never_answers_is_given_up_after_the_handshake_deadline() -> None:
    """Guards waiting for ever on a peer that died while connecting (scenario 5)."""
    bench = Bench()
    bench.expect(1, request(10))
    bench.tick(4.9)
    assert bench.all(CloseSource) == []
    bench.tick(0.1)
    assert "did not answer in 5 s" in lost(bench).error.message
    assert bench.all(CloseSource) == [CloseSource(SOURCE)]


def test_a_restarted_source_at_the_same_address_is_not_taken_for_the_old_one() -> None:
    """Guards handles of a former life being used on the new one (scenario 3)."""
    bench = Bench()
    bench.expect(1, request(10))
    bench.source(PeerWelcome(worker=SOURCE.worker, incarnation=Incarnation(45), arena=ARENA))
    assert "restarted" in lost(bench).error.message
    assert bench.all(MapArena) == []


def test_a_refusal_reaches_the_router_with_the_differing_fields() -> None:
    """Guards a mismatch that shows only as a hang (scenarios 17, 45)."""
    bench = Bench()
    bench.expect(1, request(10))
    text = "kv_dtype: 'fp32' here, 'bf16' there"
    refused = ErrorPayload(code="incompatible_peer", message=text)
    bench.source(PeerRefused(error=refused))
    assert lost(bench).error == refused


def test_a_transfer_without_progress_is_given_up_after_the_lease_time() -> None:
    bench = receiving()
    bench.tick(200.0)
    assert [m for m in bench.to_router() if isinstance(m, TransferLost)] == [], (
        "the prefill may still be queued: that is the router's and the request's time"
    )
    bench.ready(8)
    bench.copied()
    bench.tick(29.0)
    bench.tick(1.0)
    assert "no progress" in lost(bench).error.message


def test_leases_are_renewed_by_heartbeat_and_unheard_transfers_asked_for_again() -> None:
    """Guards KV lost to an expired lease, and a subscription lost on the way."""
    bench = receiving()
    bench.expect(2, request(9), transfer=71)
    bench.ready(8)
    bench.copied()
    sent: list[FromDecode] = []
    for _ in range(3):
        bench.tick(2.0)
        sent += bench.to_source()
    assert sent == [
        RenewLeases(transfers=(T, TransferId(71))),
        OpenTransfer(transfer=TransferId(71)),
    ]


def test_a_source_that_says_nothing_is_greeted_anew() -> None:
    """Guards waiting for ever on a source that has forgotten this worker after a partition."""
    bench = receiving()
    bench.tick(5.0)
    assert bench.to_source() == [RenewLeases(transfers=(T,)), OpenTransfer(transfer=T)]
    bench.tick(5.0)
    hello, *rest = bench.to_source()
    assert isinstance(hello, PeerHello)
    assert rest == [RenewLeases(transfers=(T,)), OpenTransfer(transfer=T)]
    bench.welcome()
    assert bench.to_source() == [OpenTransfer(transfer=T)] and bench.all(MapArena) == []
    bench.tick(5.0)
    assert bench.to_source()[0] == RenewLeases(transfers=(T,)), "it has answered"


def test_a_new_life_of_a_source_ends_the_links_to_its_former_one() -> None:
    bench = receiving()
    again = SourceKey(SOURCE.worker, Incarnation(45))
    bench.said(
        msgspec.structs.replace(
            NewSource(dispatch=DispatchId(1), source=kv_source(71, again)),
        )
    )
    assert bench.all(CloseSource) == [CloseSource(SOURCE)]
    assert [e.source for e in bench.all(ConnectSource)] == [again]


def test_who_is_not_a_known_source_is_not_heard() -> None:
    bench = Bench()
    bench.ready(8)
    bench.complete(8)
    assert bench.counters().late_messages == 2


def test_no_source_is_heard_about_the_transfer_of_another() -> None:
    """Guards KV and tokens of one request, taken for those of another that comes from elsewhere."""
    bench = receiving()
    other = SourceKey(WorkerId("prefill-8"), Incarnation(3))
    elsewhere = Expect(dispatch=DispatchId(2), request=request(9), source=kv_source(71, other))
    bench.said(elsewhere)
    bench.source(
        PeerWelcome(worker=other.worker, incarnation=other.incarnation, arena=ARENA), key=other
    )
    said: tuple[ToDecode, ...] = (
        ready(0, 10, (0, 2), (30, 31, 32)),
        complete(10),
        TransferGone(transfer=T, error=error()),
    )
    for message in said:
        assert bench.source(message, key=other) == []
    assert bench.counters().late_messages == len(said)
    bench.ready(10)
    (job,) = bench.all(Copy)
    assert job.source == SOURCE and job.source_blocks == (20, 21, 22)
