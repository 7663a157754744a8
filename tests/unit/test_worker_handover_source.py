"""The prefill side of the hand-over: what is announced when, and how long KV is held."""

import msgspec
import pytest

from shared.ids import HostId, Incarnation, TransferId, WorkerId
from shared.messages.fleet import ReaderStatus
from shared.messages.prefill_decode import (
    AbortTransfer,
    Acknowledge,
    KvReady,
    OpenTransfer,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    ReadyBlocks,
    RenewLeases,
    TransferComplete,
    TransferGone,
)
from shared.worker.effects import RunStep, ToReader
from shared.worker.events import LayersWritten, ReaderLost, StepFailed
from tests.unit.worker_bench import ARENA, COMPATIBILITY, HELLO, READER, Bench, error, request

T = TransferId(1)
OPEN = OpenTransfer(transfer=T)


def bench_with_reader(**limits: object) -> Bench:
    """Return a worker that decode-9 has greeted."""
    bench = Bench(**limits)  # type: ignore[arg-type]
    bench.reader(HELLO)
    return bench


def ready(
    first: int, count: int, layers: tuple[int, int], table: tuple[int, ...] | None
) -> KvReady:
    """Return an announcement of transfer 1; all generations are 1."""
    blocks = None if table is None else ReadyBlocks(table, tuple(1 for _ in table))
    return KvReady(
        transfer=T,
        first_token=first,
        num_tokens=count,
        first_layer=layers[0],
        end_layer=layers[1],
        table=blocks,
    )


def test_layers_are_announced_while_they_are_computed_and_token_1_follows() -> None:
    """Guards the overlap of transfer and compute, message by message."""
    bench = bench_with_reader()
    bench.prefill(1, request(10))
    assert bench.running is not None and bench.running.announce
    bench.reader(OPEN)
    assert bench.to_reader() == []
    bench.event(LayersWritten(1, 1))
    assert bench.to_reader() == [ready(0, 8, (0, 1), (0, 1, 2))]
    bench.step()
    assert bench.to_reader() == [ready(0, 8, (1, 2), None)]
    bench.event(LayersWritten(1, 1))
    assert bench.to_reader() == [], "a layer of an earlier step"
    bench.event(LayersWritten(2, 1))
    assert bench.to_reader() == [ready(8, 2, (0, 1), (0, 1, 2))]
    bench.step(token=60)
    assert bench.to_reader() == [
        ready(8, 2, (1, 2), None),
        TransferComplete(transfer=T, num_tokens=10, index=0, first_token_id=60),
    ]
    assert bench.output().tokens[0].token == 60
    assert bench.output().prefilled[0].dispatch == 1
    assert bench.state.load().held == 1 and bench.state.load().blocks_leased == 3
    bench.reader(Acknowledge(transfer=T))
    assert bench.empty() and bench.state.idle


def test_without_pipelining_all_is_announced_at_the_end() -> None:
    bench = bench_with_reader(pipeline=False)
    bench.reader(OPEN)
    bench.prefill(1, request(10))
    assert bench.running is not None and not bench.running.announce
    bench.step()
    assert bench.to_reader() == []
    bench.step()
    first, last = bench.to_reader()
    assert first == ready(0, 10, (0, 2), (0, 1, 2))
    assert isinstance(last, TransferComplete)


def test_blocks_from_the_prefix_cache_are_announced_before_the_first_chunk_is_computed() -> None:
    bench = bench_with_reader()
    bench.run(9, request(8, max_tokens=1))
    bench.step()
    bench.reader(OPEN)
    bench.prefill(1, request(11))
    assert bench.to_reader() == [ready(0, 8, (0, 2), (0, 1, 2))]
    bench.step()
    announced, complete = bench.to_reader()
    assert announced == ready(8, 3, (0, 2), (0, 1, 2))
    assert isinstance(complete, TransferComplete) and complete.num_cached_tokens == 8


def test_a_late_subscriber_gets_everything_at_once() -> None:
    """Guards the race between the two dispatches of a pair."""
    bench = bench_with_reader()
    bench.prefill(1, request(10))
    bench.steps(2)
    bench.reader(OPEN)
    assert [type(m) for m in bench.to_reader()] == [KvReady, TransferComplete]
    assert bench.to_reader()[0] == ready(0, 10, (0, 2), (0, 1, 2))


def test_token_1_that_ends_the_request_holds_nothing() -> None:
    bench = bench_with_reader()
    bench.reader(OPEN)
    bench.prefill(1, request(5, max_tokens=1))
    bench.step()
    assert bench.finished().reason == "length" and bench.output().prefilled == ()
    complete = bench.to_reader()[-1]
    assert isinstance(complete, TransferComplete) and complete.finished
    assert bench.empty()
    bench.reader(Acknowledge(transfer=T))
    assert bench.state.idle


def test_a_lease_lasts_while_it_is_renewed_and_then_ends() -> None:
    """Guards both ends: KV taken away too early, and held for ever (scenarios 12, 19)."""
    bench = bench_with_reader()
    bench.reader(OPEN)
    bench.prefill(1, request(5))
    bench.step()
    for _ in range(4):
        bench.tick(20.0)
        bench.reader(RenewLeases(transfers=(T,)))
        assert bench.state.load().held == 1
    bench.tick(29.0)
    assert bench.state.load().held == 1
    bench.tick(1.0)
    (gone,) = bench.to_reader()
    assert isinstance(gone, TransferGone) and "expired" in gone.error.message
    assert bench.empty() and bench.counters().leases_expired == 1
    assert bench.report().readers == (ReaderStatus(reader=HELLO.worker, leases_expired=1),)
    bench.reader(OPEN)
    assert isinstance(bench.to_reader()[0], TransferGone), "also for who asks later"


def test_held_blocks_are_never_evicted_under_pressure() -> None:
    """Guards KV that is overwritten before it was sent (scenario 12)."""
    bench = Bench(blocks=6)
    bench.reader(HELLO)
    bench.prefill(1, request(12))
    bench.steps(2)
    bench.run(2, request(tuple(range(12)), max_tokens=1))
    assert bench.running is not None
    (item,) = bench.running.batch.sequences
    assert not set(item.block_table) & {0, 1, 2}
    bench.run(3, request(tuple(range(50, 62)), max_tokens=1))
    bench.steps(2)
    bench.reader(OPEN)
    bench.steps(2)
    assert bench.state.load().held == 1
    assert [bench.pool.generation(b) for b in (0, 1, 2)] == [1, 1, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["refused", "failed", "cancelled", "cancelled when held"])
@pytest.mark.parametrize("subscribed", ["before", "after"])
def test_a_prefill_that_does_not_come_off_is_told_to_its_reader(how: str, subscribed: str) -> None:
    """Guards a decode worker that waits for, or uses, what will never be right (10, 34)."""
    bench = bench_with_reader()
    if subscribed == "before":
        bench.reader(OPEN)
    bench.prefill(1, request((1, -5)) if how == "refused" else request(5))
    if how == "failed":
        bench.running = None
        bench.event(StepFailed(1, error()))
    elif how == "cancelled when held":
        bench.step()
        bench.cancel(1)
    elif how == "cancelled":
        bench.cancel(1)
    told = bench.to_reader()
    if subscribed == "after":
        assert told == []
        bench.reader(OPEN)
        told = bench.to_reader()
    (gone,) = told
    assert isinstance(gone, TransferGone) and gone.transfer == T
    if bench.running is not None:
        bench.step()
    assert bench.empty() and bench.state.idle


def test_a_cancel_during_prefill_stops_its_compute_after_the_running_step() -> None:
    """Guards work for a client that has left (scenario 28)."""
    bench = bench_with_reader()
    bench.prefill(1, request(40))
    bench.cancel(1)
    bench.step()
    assert bench.running is None and bench.empty()


@pytest.mark.parametrize("moment", ["early", "computing", "held"])
def test_an_abort_of_the_reader_frees_at_once_but_token_1_still_comes(moment: str) -> None:
    """Guards blocks pinned for a reader that has given up (scenarios 7, 20)."""
    bench = bench_with_reader()
    if moment == "early":
        bench.reader(AbortTransfer(transfer=T))
    bench.prefill(1, request(5))
    bench.reader(OPEN)
    if moment == "computing":
        bench.reader(AbortTransfer(transfer=T))
    bench.step()
    assert bench.output().prefilled[0].dispatch == 1
    if moment == "held":
        assert bench.state.load().held == 1
        bench.reader(AbortTransfer(transfer=T))
    assert bench.empty() and bench.state.idle


@pytest.mark.parametrize("how", ["unreachable", "restarted"])
def test_a_lost_readers_leases_end_at_once(how: str) -> None:
    """Guards a pool pinned by a decode worker that is dead (scenario 6)."""
    bench = bench_with_reader()
    bench.reader(OPEN)
    bench.prefill(1, request(5))
    bench.step()
    if how == "unreachable":
        bench.event(ReaderLost(READER))
    else:
        again = msgspec.structs.replace(HELLO, incarnation=Incarnation(6))
        bench.reader(again, peer=b"decode-9#6")
    assert bench.empty() and bench.state.idle


def test_who_did_not_greet_gets_nothing_and_allocates_nothing() -> None:
    bench = Bench()
    for number in range(50):
        assert bench.reader(OpenTransfer(transfer=TransferId(number)), peer=b"stranger") == []
    assert bench.counters().late_messages == 50


def test_early_subscriptions_are_bounded_and_end_by_themselves() -> None:
    """Guards state that unknown transfer ids allocate without limit."""
    bench = bench_with_reader(max_open=3)
    for number in range(10, 13):
        bench.reader(OpenTransfer(transfer=TransferId(number)))
        assert bench.to_reader() == []
    bench.reader(OpenTransfer(transfer=TransferId(13)))
    assert isinstance(bench.to_reader()[0], TransferGone)
    bench.tick(30.0)
    assert sorted(m.transfer for m in bench.to_reader() if isinstance(m, TransferGone)) == [
        10,
        11,
        12,
    ]


def test_asking_again_and_again_for_what_never_comes_is_answered() -> None:
    """Guards a reader that waits for ever: its heartbeats must not keep the subscription alive."""
    bench = bench_with_reader()
    for _ in range(12):
        bench.reader(OPEN)
        assert bench.to_reader() == []
        bench.tick(5.0)
    (gone,) = bench.to_reader()
    assert isinstance(gone, TransferGone) and gone.transfer == T


def test_a_late_hello_of_a_former_life_is_mended_by_the_next_one_of_the_newest() -> None:
    """Guards a reader that is taken for dead, and never answered again, for a message overtaken."""
    bench = bench_with_reader()
    bench.prefill(1, request(5))
    bench.reader(OPEN)
    former = msgspec.structs.replace(HELLO, incarnation=Incarnation(4))
    bench.reader(former, peer=b"decode-9#4")
    assert bench.reader(OPEN) == [], "nobody knows it any more"
    bench.reader(HELLO)
    assert isinstance(bench.to_reader()[0], PeerWelcome)
    bench.reader(OPEN)
    (gone,) = bench.to_reader()
    assert isinstance(gone, TransferGone) and "given up" in gone.error.message
    bench.step()
    second = OpenTransfer(transfer=TransferId(2))
    bench.prefill(2, request(6))
    bench.reader(second)
    bench.step()
    assert [type(m) for m in bench.to_reader()][-1] is TransferComplete


def test_messages_about_a_transfer_that_is_over_change_nothing() -> None:
    """Guards against late and doubled acknowledgements (scenario 29)."""
    bench = bench_with_reader()
    bench.reader(OPEN)
    bench.prefill(1, request(5))
    bench.step()
    bench.reader(Acknowledge(transfer=T))
    for message in (Acknowledge(transfer=T), RenewLeases(transfers=(T,))):
        assert bench.reader(message) == []
    assert bench.counters().late_messages == 2


def test_a_fitting_reader_is_told_where_the_arena_is() -> None:
    bench = Bench()
    assert bench.reader(HELLO) == [
        ToReader(
            READER,
            PeerWelcome(
                worker=WorkerId("worker-0"),
                incarnation=Incarnation(11),
                arena=ARENA,
                host=HELLO.host,
                codec="none",
                codec_reason="configured",
            ),
        )
    ]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_dtype": "fp8"}, "kv_dtype: 'bf16' here, 'fp8' there"),
        ({"layout": "x", "block_size": 8}, "block_size: 4 here, 8 there; layout: 'l' here"),
        ({"tensor_parallel": 2}, "tensor_parallel: 1 here, 2 there"),
        ({"wire_version": 2}, "wire_version: 1 here, 2 there"),
    ],
)
def test_a_reader_that_does_not_fit_is_refused_with_the_differing_fields(
    change: dict[str, object], named: str
) -> None:
    """Guards KV read with the wrong dtype, block size, shape or ranks (scenarios 39, 43-45)."""
    bench = Bench()
    other = msgspec.structs.replace(COMPATIBILITY, **change)
    bench.reader(msgspec.structs.replace(HELLO, compatibility=other))
    (refused,) = bench.to_reader()
    assert isinstance(refused, PeerRefused)
    assert refused.error.code == "incompatible_peer" and named in refused.error.message
    assert bench.reader(OPEN) == []


def test_a_reader_on_another_host_is_refused() -> None:
    """Guards against mapping a foreign process's memory by its pid (scenario 42)."""
    bench = Bench()
    hello: PeerHello = msgspec.structs.replace(HELLO, host=HostId("elsewhere"))
    bench.reader(hello)
    (refused,) = bench.to_reader()
    assert isinstance(refused, PeerRefused) and "host: 'here' here" in refused.error.message


def test_two_prompts_share_cached_blocks_while_both_are_held() -> None:
    """Guards reference counts of blocks under two leases."""
    bench = bench_with_reader(max_batch_tokens=32)
    bench.prefill(1, request(9))
    bench.step()
    bench.prefill(2, request(9))
    assert isinstance(bench.effects[0], RunStep)
    bench.step()
    assert bench.state.load().blocks_leased == 4
    bench.cancel(1)
    assert bench.state.load().blocks_leased == 3
    bench.cancel(2)
    assert bench.empty()
