"""KV goes to the decode worker it was computed for, and ends by its word alone."""

import msgspec

from shared.ids import TransferId, WorkerId
from shared.messages.prefill_decode import (
    AbortTransfer,
    Acknowledge,
    OpenTransfer,
    RenewLeases,
    TransferComplete,
    TransferGone,
)
from tests.unit.test_worker_handover_source import OPEN, T, bench_with_reader
from tests.unit.worker_bench import HELLO, request


def test_nobody_but_the_meant_reader_gets_or_ends_a_transfer_that_has_not_begun() -> None:
    """Guards KV announced to whoever subscribed before its prefill came, or given up by him."""
    bench = bench_with_reader()
    other = b"decode-8#1"
    bench.reader(msgspec.structs.replace(HELLO, worker=WorkerId("decode-8")), peer=other)
    bench.to_reader()
    bench.reader(OPEN, peer=other)
    bench.prefill(1, request(5))
    (gone,) = bench.to_reader()
    assert isinstance(gone, TransferGone) and "meant for decode-9" in gone.error.message
    second = TransferId(2)
    bench.reader(AbortTransfer(transfer=second), peer=other)
    bench.reader(OpenTransfer(transfer=second))
    assert bench.to_reader() == [], "he cannot have given up what is not his"
    bench.prefill(2, request(5))
    third = TransferId(3)
    bench.reader(OpenTransfer(transfer=third))
    bench.reader(AbortTransfer(transfer=third), peer=other)
    bench.prefill(3, request(5))
    bench.reader(OPEN)
    served = list[TransferId]()
    while bench.running is not None:
        bench.step()
        served += [m.transfer for m in bench.to_reader() if isinstance(m, TransferComplete)]
    assert served == [T, second, third]
    for transfer in served:
        bench.reader(Acknowledge(transfer=transfer))
    assert bench.empty() and bench.state.idle


def test_only_the_meant_reader_may_subscribe_renew_and_acknowledge() -> None:
    bench = bench_with_reader()
    other = b"decode-8#1"
    bench.reader(msgspec.structs.replace(HELLO, worker=WorkerId("decode-8")), peer=other)
    bench.prefill(1, request(5))
    bench.reader(OPEN)
    bench.step()
    bench.reader(OPEN, peer=other)
    (gone,) = bench.to_reader()
    assert isinstance(gone, TransferGone) and "meant for decode-9" in gone.error.message
    for message in (
        Acknowledge(transfer=T),
        AbortTransfer(transfer=T),
        RenewLeases(transfers=(T,)),
    ):
        assert bench.reader(message, peer=other) == []
    assert bench.state.load().held == 1
    assert bench.counters().late_messages == 3
