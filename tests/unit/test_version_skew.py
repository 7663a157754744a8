"""Peers of another release: the version is compared first, and its author is refused by name."""

from typing import Any

import msgspec
import pytest

from services.router.effects import Note as RouterNote
from services.router.events import WorkerMessage
from shared.messages.fleet import OtherVersion
from shared.messages.hello import WIRE_VERSION, UnreadHello
from shared.messages.prefill_decode import (
    FromDecode,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    ToDecode,
    UnreadWelcome,
)
from shared.messages.router_worker import (
    FromWorker,
    TransferLost,
    WorkerHello,
    WorkerRefused,
)
from shared.transport.link import Receive, _Codec
from shared.worker.effects import ToRouter
from tests.unit.message_samples import sample
from tests.unit.router_world import COMPATIBILITY, World
from tests.unit.worker_bench import HELLO, SOURCE, Bench, request

LATER = WIRE_VERSION + 1
BOTH = f"wire_version: {WIRE_VERSION} here, {LATER} there"


def later(message: type[msgspec.Struct], **changes: Any) -> bytes:
    """Return what a later version might say instead, which this one cannot decode."""
    tree = msgspec.to_builtins(sample(message, full=True))
    if "compatibility" in tree:
        tree["compatibility"]["wire_version"] = LATER
    return msgspec.msgpack.encode(tree | changes)


@pytest.mark.parametrize(
    ("union", "message", "changes"),
    [
        (FromDecode, PeerHello, {"codecs": "all"}),
        (FromDecode, PeerHello, {"path": {"prefer": "rdma"}}),
        (FromDecode, PeerHello, {"incarnation": "a7"}),
        (FromWorker, WorkerHello, {"role": "encode"}),
    ],
)
def test_a_hello_that_cannot_be_read_still_tells_who_and_which_version(
    union: object, message: type[msgspec.Struct], changes: dict[str, Any]
) -> None:
    """Guards a field of a later version that makes its whole frame garbage (45)."""
    codec: _Codec[Any, Any] = _Codec(Receive(union, UnreadHello), 1 << 20)
    name = {"worker": "decode-5"}
    heard = codec.decode([later(message, **changes, **name)])
    assert isinstance(heard, UnreadHello) and heard.worker == "decode-5"
    assert heard.difference().startswith(BOTH)
    tree = msgspec.msgpack.decode(later(message, **changes, **name))
    tree["compatibility"]["wire_version"] = WIRE_VERSION
    assert codec.decode([msgspec.msgpack.encode(tree)]) is None, "of this version it is garbage"


def test_a_reader_of_a_later_version_is_refused_by_both_versions_only() -> None:
    """Guards silence, and a list of differences that mean nothing between two versions (45)."""
    bench = Bench()
    heard = msgspec.msgpack.decode(later(PeerHello, worker="decode-9"), type=UnreadHello)
    bench.reader(heard)
    other = msgspec.structs.replace(HELLO.compatibility, wire_version=LATER, model="x")
    for hello in (None, msgspec.structs.replace(HELLO, compatibility=other, path="rdma")):
        if hello is not None:
            bench.reader(hello)
        (refused,) = bench.to_reader()
        assert isinstance(refused, PeerRefused) and refused.error.code == "incompatible_peer"
        assert refused.error.message == (
            f"worker-0 and decode-9 do not fit: {BOTH}; install the same release on both sides"
        )


def test_a_path_that_this_version_does_not_know_is_named() -> None:
    """Guards `auto` agreeing to a path of a later build that speaks the same version."""
    bench = Bench()
    frame = msgspec.msgpack.encode(msgspec.structs.replace(HELLO, path="rdma"))
    bench.reader(msgspec.msgpack.decode(frame, type=FromDecode))
    (refused,) = bench.to_reader()
    assert isinstance(refused, PeerRefused)
    assert refused.error.message.endswith(
        "transfer.path: auto here, rdma there, which is not known here"
    )


def test_an_answer_that_cannot_be_read_is_a_named_loss_at_once() -> None:
    """Guards `did not answer in 5 s` where the source did answer (45)."""
    codec: _Codec[Any, Any] = _Codec(Receive(ToDecode, UnreadWelcome), 1 << 20)
    heard = codec.decode([later(PeerWelcome, path="rdma", worker="prefill-9")])
    assert isinstance(heard, UnreadWelcome)
    bench = Bench()
    bench.expect(1, request(10))
    bench.source(heard)  # type: ignore[arg-type]
    (loss,) = [e.message for e in bench.all(ToRouter) if isinstance(e.message, TransferLost)]
    assert loss.error.code == "incompatible_peer"
    assert f"{SOURCE.worker} answered what this worker (wire_version 1)" in loss.error.message
    bench = Bench()
    bench.expect(1, request(10))
    bench.welcome()
    bench.source(heard)  # type: ignore[arg-type]
    assert not bench.to_router(), "once it is welcome, a spoiled repetition changes nothing"


def test_the_router_refuses_a_later_worker_by_both_versions() -> None:
    """Guards a worker that says hello for ever and is never seen (45)."""
    world = World()
    heard = msgspec.msgpack.decode(
        later(WorkerHello, worker="decode-7", role="encode"), type=UnreadHello
    )
    world.handle(WorkerMessage(b"decode-7#1", heard))
    refused = world.one(b"decode-7#1", WorkerRefused)
    assert refused.error.code == "incompatible_peer" and BOTH in refused.error.message
    (note,) = [e.text for e in world.effects if isinstance(e, RouterNote)]
    assert note.startswith("worker decode-7 refused: the worker does not fit the fleet: ")
    known = world.worker("decode-7")
    world.handle(WorkerMessage(known, heard))
    assert world.one(known, WorkerRefused) and known not in world.state.fleet.by_peer


def test_the_status_counts_peers_of_another_version_and_names_the_newest() -> None:
    """Guards an operator who learns of a half-updated fleet from a log line only (45)."""
    world = World()
    unread = msgspec.msgpack.decode(later(WorkerHello, worker="decode-7"), type=UnreadHello)
    world.handle(WorkerMessage(b"decode-7#1", unread))
    older = msgspec.structs.replace(COMPATIBILITY, wire_version=0)
    world.worker("prefill-" + "9" * 100, compatibility=older)
    world.worker("decode-0")
    world.worker("decode-1", compatibility=msgspec.structs.replace(COMPATIBILITY, model="x"))
    status = world.state.status(world.now)
    assert status.counters.other_versions == 2, "another model is not another version"
    assert status.other_version == OtherVersion(("prefill-" + "9" * 100)[:64], 0)
