"""A decode worker meets its sources when it hears of them, not when a request needs one."""

from shared.errors import ErrorPayload
from shared.ids import Incarnation, TransferId, WorkerId
from shared.messages.fleet import PairStatus
from shared.messages.prefill_decode import OpenTransfer, PeerHello, PeerRefused, PeerWelcome
from shared.messages.router_worker import KvPeer, RouterBeat
from shared.worker.effects import CloseSource, ConnectSource, MapArena, Note, ToSource
from shared.worker.events import PathChosen, SourceKey, SourceLost
from tests.unit.worker_bench import ARENA, SOURCE, Bench, error, request

ROUTER = Incarnation(1)
ENDPOINT = "ipc:///tmp/kv-prefill-9"


def peer(key: SourceKey = SOURCE) -> KvPeer:
    """Return what the router tells of a source."""
    return KvPeer(worker=key.worker, incarnation=key.incarnation, endpoint=ENDPOINT)


def told(bench: Bench, *keys: SourceKey) -> list[SourceKey]:
    """The router names these sources; return who is greeted at once."""
    bench.said(RouterBeat(incarnation=ROUTER, sources=tuple(peer(key) for key in keys)))
    return greeted(bench)


def greeted(bench: Bench) -> list[SourceKey]:
    """Return whom the last event greeted."""
    hellos = [e.source for e in bench.all(ToSource) if isinstance(e.message, PeerHello)]
    assert hellos == [e.source for e in bench.all(ConnectSource)]
    return hellos


def many(count: int) -> list[SourceKey]:
    """Return so many prefill workers."""
    return [SourceKey(WorkerId(f"prefill-{i}"), Incarnation(100 + i)) for i in range(count)]


def welcome(bench: Bench, key: SourceKey) -> None:
    """This source welcomes the worker."""
    bench.source(PeerWelcome(worker=key.worker, incarnation=key.incarnation, arena=ARENA), key=key)


def pair(bench: Bench) -> PairStatus:
    """Return the only pair that the worker reports."""
    (line,) = bench.report().pairs
    return line


def test_a_path_is_settled_and_reported_before_any_request() -> None:
    """Guards a first request that pays for hello and self-test, and a path nobody can see."""
    bench = Bench()
    assert told(bench, SOURCE) == [SOURCE]
    assert bench.welcome() == [MapArena(SOURCE, ARENA)]
    bench.event(PathChosen(SOURCE, "ipc", "self_test"))
    line = pair(bench)
    assert (line.path, line.reason, line.transfers, line.chosen) == ("ipc", "self_test", 0, 1)
    assert [e.message for e in bench.expect(1, request(10)) if isinstance(e, ToSource)] == [
        OpenTransfer(transfer=TransferId(70))
    ]
    assert told(bench, SOURCE) == [], "a source that is met is not met again"


def test_few_meetings_are_open_at_once_and_the_rest_follows() -> None:
    """Guards a fleet of many prefill workers that are all tested in one moment."""
    bench = Bench()
    keys = many(9)
    first = told(bench, *keys)
    assert first == keys[:4]
    bench.tick(0.1)
    assert greeted(bench) == []
    welcome(bench, first[0])
    bench.event(PathChosen(first[0], "host", "other_host", "declined"))
    bench.event(SourceLost(first[1], error()))
    bench.tick(0.1)
    assert greeted(bench) == keys[4:6]
    bench.tick(6.0)  # none of the four says welcome in time
    assert {e.source for e in bench.all(CloseSource)} == set(keys[2:6])
    assert greeted(bench) == keys[6:9]


def test_a_request_does_not_wait_for_the_meetings() -> None:
    """Guards a request whose source stands last in the line."""
    bench = Bench()
    told(bench, *many(9), SOURCE)
    bench.expect(1, request(10))
    assert greeted(bench) == [SOURCE]


def test_a_source_that_came_back_is_met_again() -> None:
    """Guards a pair whose path is that of a former life."""
    bench = Bench()
    told(bench, SOURCE)
    bench.welcome()
    bench.event(PathChosen(SOURCE, "ipc", "self_test"))
    again = SourceKey(SOURCE.worker, Incarnation(45))
    assert told(bench, again) == [again]
    assert bench.all(CloseSource) == [CloseSource(SOURCE)]
    welcome(bench, again)
    bench.event(PathChosen(again, "ipc", "self_test"))
    assert pair(bench).chosen == 2


def test_of_a_source_that_waits_only_the_newest_life_is_met() -> None:
    """Guards a meeting with a dead process, which would end the link to its successor."""
    bench = Bench()
    told(bench, *many(4))
    again = SourceKey(SOURCE.worker, Incarnation(45))
    assert told(bench, SOURCE) == told(bench, again) == []
    bench.event(SourceLost(many(1)[0], error()))
    bench.tick(0.1)
    assert greeted(bench) == [again]


def test_a_refusal_is_told_and_harms_nothing() -> None:
    """Guards a pair that does not fit and shows only once a request has failed."""
    bench = Bench()
    told(bench, SOURCE)
    text = "prefill-9 and worker-0 do not fit: block_size: 16 here, 4 there"
    refused = PeerRefused(error=ErrorPayload(code="incompatible_peer", message=text))
    effects = bench.source(refused)
    assert effects == [
        Note(f"no path for KV of prefill-9: incompatible_peer: {text}"),
        CloseSource(SOURCE),
    ]
    line = pair(bench)
    assert (line.path, line.problem, line.failed) == (None, text, 0)
    bench.run(2, request(4))
    assert bench.work() == [(0, 4, True)]
    bench.expect(1, request(10))
    assert greeted(bench) == [SOURCE], "a request tries again"
    bench.welcome()
    bench.event(PathChosen(SOURCE, "host", "other_host", "declined"))
    line = pair(bench)
    assert (line.path, line.problem, line.former) == ("host", None, False)


def test_the_first_hand_over_after_a_meeting_is_measured() -> None:
    """Guards first hand-overs that do not count for the choice of pipelining."""
    bench = Bench(pipeline="auto")
    told(bench, SOURCE)
    bench.welcome()
    bench.event(PathChosen(SOURCE, "ipc", "self_test"))
    bench.expect(1, request(10))
    (opened,) = bench.to_source()
    assert isinstance(opened, OpenTransfer) and opened.pipelined
    bench.ready(10)
    bench.copied()
    bench.complete(10)
    bench.step()
    bench.expect(2, request(10), transfer=71)
    (opened,) = [m for m in bench.to_source() if isinstance(m, OpenTransfer)]
    assert not opened.pipelined, "the other way is tried next, so the first one counted"
