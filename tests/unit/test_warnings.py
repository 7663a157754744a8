"""What goes wrong with one request leaves one line: who, what by name, and what happens next."""

import logging

import msgspec
import pytest

from services.router.effects import Note as RouterNote
from services.router.events import WorkerExited
from shared.ids import TransferId
from shared.messages.prefill_decode import OpenTransfer, PeerRefused
from shared.messages.router_worker import Run
from shared.telemetry.bounded_log import BoundedLog, LineBudget, one_line
from shared.worker.effects import Copy, Note
from shared.worker.events import CopyFailed
from tests.unit.router_world import SplitWorld, World
from tests.unit.worker_bench import HELLO, Bench, error, request


def notes(world: World) -> list[str]:
    """Return the lines about requests that the last event brought."""
    return [e.text for e in world.effects if isinstance(e, RouterNote) and e.frequent]


def test_a_lost_transfer_names_request_pair_error_and_next_step() -> None:
    """Guards losses that nobody can find once the counters have moved."""
    world = SplitWorld(prefills=2)
    prefill, expect = world.start("r-17")
    world.lost(world.decodes[0], expect.dispatch, prefill.dispatch)
    assert notes(world) == [
        "request r-17: prefill-0: transfer_failed: scripted; prefill-1 computes its prompt anew "
        "(decode on decode-0)"
    ]


def test_a_prompt_that_decode_computes_itself_is_told_so() -> None:
    world = SplitWorld(on_no_prefill="local")
    _, expect = world.start("r")
    world.handle(WorkerExited(world.prefills[0]))
    assert world.one(world.decodes[0], Run).dispatch == expect.dispatch
    (line,) = notes(world)
    assert line.startswith("request r: prefill-0: worker_lost: worker prefill-0 exited; ")
    assert line.endswith("decode computes its prompt itself (decode on decode-0)")


def test_retries_and_their_end_are_one_line_each() -> None:
    """Guards a request that fails after its attempts without a word on any server."""
    world = World(deployment_type="colocated", max_retries=1)
    gate, mixed = world.gateway(), world.worker("mixed-0")
    world.generate(gate, "r")
    for then in ("is placed anew", "failed 2 times in a row (router.max_retries)"):
        run = world.one(mixed, Run)
        world.failed(mixed, run.dispatch, "worker_lost")
        assert notes(world) == [f"request r: mixed-0: worker_lost: scripted; {then}"]


def test_a_client_s_own_mistake_is_no_warning() -> None:
    """Guards a log that any client can fill."""
    world = SplitWorld()
    prefill, _ = world.start()
    world.failed(world.prefills[0], prefill.dispatch, "invalid_request", retryable=False)
    assert notes(world) == []


def test_output_that_cannot_be_believed_is_one_line_with_its_request() -> None:
    world = World(deployment_type="colocated")
    gate, mixed = world.gateway(), world.worker("mixed-0")
    world.generate(gate, "r")
    world.tokens(mixed, world.one(mixed, Run).dispatch, 0, -1)
    (line,) = notes(world)
    assert line.startswith("request r: mixed-0: worker_lost: mixed-0 sent a token outside its voca")
    assert line.endswith("; is placed anew")


def test_decode_says_which_kv_it_lost() -> None:
    bench = Bench()
    bench.expect(1, request(10))
    bench.welcome()
    bench.ready(10)
    (job,) = bench.all(Copy)
    bench.event(CopyFailed(job.job, error("transfer_failed"), reused=1))
    (note,) = bench.all(Note)
    assert note.text == (
        "request r: its KV (transfer 70) from prefill-9 is lost: transfer_failed: made up; "
        "the router is asked for another source"
    )


def test_a_refused_pair_is_named_on_both_sides() -> None:
    """Guards a deployment where nothing is ever split and no log says why."""
    bench = Bench()
    bench.expect(1, request(10))
    bench.source(PeerRefused(error=error("incompatible_peer")))
    (note,) = bench.all(Note)
    assert "from prefill-9 is lost: incompatible_peer: made up" in note.text
    other = msgspec.structs.replace(HELLO.compatibility, model="another")
    bench.reader(msgspec.structs.replace(HELLO, compatibility=other))
    (note,) = bench.all(Note)
    assert note.text.startswith("refused as a reader: incompatible_peer: worker-0 and decode-9 do")


def test_an_expired_lease_names_request_and_reader() -> None:
    bench = Bench()
    bench.reader(HELLO)
    bench.reader(OpenTransfer(transfer=TransferId(1)))
    bench.prefill(1, request(5))
    bench.step()
    bench.tick(31.0)
    (note,) = bench.all(Note)
    assert note.text.startswith("request r: decode-9 neither fetched its KV (transfer 1) nor renew")
    assert "for 30 s; its blocks are free again" in note.text


def test_a_preempted_request_says_what_is_computed_again() -> None:
    bench = Bench(blocks=8)
    bench.run(1, request(8, max_tokens=16))
    bench.run(2, request(tuple(range(8)), max_tokens=16))
    said: list[str] = []
    while bench.running is not None:
        bench.step()
        said += [note.text for note in bench.all(Note)]
    (line,) = said
    assert line.startswith("request r: preempted after ")
    assert line.endswith("because all 8 KV blocks are taken; its KV is computed again")


def test_a_flood_of_lines_is_cut_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Guards disk and log readers when a worker with a thousand requests dies."""
    log = BoundedLog(logging.getLogger("flood"))
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            log.warning(f"request {number}")
    assert caplog.messages[:2] == ["request 0", "request 1"]
    assert len(caplog.messages) < 30
    assert "more of this kind follows" in caplog.messages[20]


def test_what_was_left_out_is_told_even_if_nothing_follows(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a flood was never counted, at the end of the process neither."""
    now = 0.0
    monkeypatch.setattr("shared.telemetry.bounded_log.time.monotonic", lambda: now)
    log = BoundedLog(logging.getLogger("flood"))
    with caplog.at_level(logging.WARNING):
        for number in range(30):
            log.warning(f"request {number}")
        log.flush()
        assert "follows" in caplog.messages[-1]
        now = 1.0
        log.flush()
        assert caplog.messages[-1] == (
            "no more of this kind (10 lines before this one were left out)"
        )
        log.flush()
    assert len(caplog.messages) == 22


def test_a_budget_fills_up_again() -> None:
    budget = LineBudget(burst=2, per_second=0.5)
    assert [budget.take(now) for now in (10.0, 10.0, 10.0, 11.0, 12.0, 12.0)] == [
        *(True, True, False, False),
        *(True, False),
    ]
    assert [budget.take(now) for now in (99.0, 99.0, 99.0)] == [True, True, False]


def test_what_clients_and_peers_say_is_one_short_line() -> None:
    """Guards lines made up by whoever chooses a request's id or an error's sentence."""
    assert one_line("a\nb\r\x1b[31mc\u2028d") == "a?b??[31mc?d"
    assert len(one_line("x" * 5000)) == 600
