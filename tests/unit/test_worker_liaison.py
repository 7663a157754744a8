"""The worker and its router: greeting, heartbeat, restarts, draining, leaving."""

from shared.errors import ErrorPayload
from shared.ids import Incarnation, TransferId
from shared.messages.prefill_decode import AbortTransfer, Acknowledge, OpenTransfer, TransferGone
from shared.messages.router_worker import (
    Drained,
    DrainWorker,
    Report,
    RouterBeat,
    SetRole,
    StepOutput,
    WorkerBye,
    WorkerHello,
    WorkerRefused,
    WorkerWelcome,
)
from shared.worker.effects import Exit, ToRouter
from shared.worker.events import RouterSaid, StopRequested, Tick
from shared.worker.state import WorkerState
from tests.unit.worker_bench import HELLO, IDENTITY, LIMITS, Bench, request

NEW_ROUTER = Incarnation(2)


def sent(bench: Bench) -> list[type]:
    """Return the types of the last event's messages to the router."""
    return [type(effect.message) for effect in bench.all(ToRouter)]


def test_hello_is_repeated_until_welcome_ever_more_rarely() -> None:
    """Guards a worker that starts before its router, and a flood when there is none."""
    state = WorkerState(IDENTITY, LIMITS, Bench().pool)
    moments = []
    for tick in range(400):
        effects = state.handle(Tick(), tick * 0.1)
        assert all(isinstance(e, ToRouter) and isinstance(e.message, WorkerHello) for e in effects)
        if effects:
            moments.append(round(tick * 0.1))
    assert moments[:4] == [0, 1, 3, 7] and len(moments) < 9
    assert not state.welcomed
    state.handle(RouterSaid(WorkerWelcome(incarnation=Incarnation(1))), 40.0)
    assert state.welcomed


def test_hello_says_what_placement_needs() -> None:
    bench = Bench(max_model_len=48)
    bench.said(RouterBeat(incarnation=NEW_ROUTER))
    (hello,) = bench.to_router()
    assert isinstance(hello, WorkerHello)
    assert (hello.worker, hello.role, hello.max_model_len) == ("worker-0", "mixed", 48)
    assert hello.kv_endpoint == "ipc:///tmp/kv"


def test_reports_come_every_second_and_on_change() -> None:
    bench = Bench()
    bench.tick(0.1)
    assert sent(bench) == [Report]
    bench.tick(0.1)
    assert sent(bench) == []
    bench.run(1, request(3))
    bench.tick(0.1)
    (report,) = [e.message for e in bench.all(ToRouter)]
    assert isinstance(report, Report) and report.load.busy and report.load.running == 1
    for _ in range(9):
        bench.tick(0.1)
        assert sent(bench) == []
    bench.tick(0.11)
    assert sent(bench) == [Report]


def test_a_silent_router_is_greeted_again_while_the_work_goes_on() -> None:
    bench = Bench()
    bench.run(1, request(3, max_tokens=4))
    bench.tick(3.0)
    assert sent(bench) == [WorkerHello]
    bench.step()
    assert len(bench.output().tokens) == 1


def test_a_restarted_router_finds_a_worker_without_old_work() -> None:
    """Guards results of dispatches the new router never made."""
    bench = Bench()
    bench.reader(HELLO)
    bench.prefill(1, request(5))
    bench.reader(OpenTransfer(transfer=TransferId(1)))
    bench.step()
    bench.run(2, request((1, 2, 3)))
    bench.expect(3, request(9))
    bench.welcome()
    bench.said(RouterBeat(incarnation=NEW_ROUTER))
    assert sent(bench) == [WorkerHello]
    assert [type(m) for m in bench.to_reader()] == [TransferGone]
    assert bench.to_source() == [AbortTransfer(transfer=TransferId(70))]
    bench.said(WorkerWelcome(incarnation=NEW_ROUTER))
    bench.step()
    assert bench.to_router() == [] and bench.empty() and bench.state.idle
    bench.run(2, request(3))
    assert bench.running is not None, "its dispatches are new ones"


def test_a_repeated_welcome_of_the_same_router_changes_nothing() -> None:
    bench = Bench()
    bench.run(1, request(3))
    bench.said(WorkerWelcome(incarnation=Incarnation(1)))
    bench.step()
    assert len(bench.output().tokens) == 1


def test_drained_is_answered_once_the_last_lease_has_ended() -> None:
    bench = Bench()
    bench.reader(HELLO)
    bench.prefill(1, request(5))
    bench.reader(OpenTransfer(transfer=TransferId(1)))
    bench.said(DrainWorker())
    bench.step()
    assert Drained() not in bench.to_router()
    bench.reader(Acknowledge(transfer=TransferId(1)))
    assert bench.to_router() == [Drained()]
    bench.tick(0.1)
    assert Drained() not in bench.to_router()


def test_a_drained_worker_takes_another_role_and_says_so() -> None:
    bench = Bench()
    bench.said(DrainWorker())
    assert bench.to_router() == [Drained()]
    bench.said(SetRole(role="decode"))
    (hello,) = bench.to_router()
    assert isinstance(hello, WorkerHello) and hello.role == "decode"
    assert bench.state.role == "decode"
    bench.run(1, request(3))
    assert bench.running is not None


def test_stop_finishes_what_is_open_and_refuses_the_rest() -> None:
    """Guards requests that fail because a worker is scaled down (scenario 61)."""
    bench = Bench()
    bench.run(1, request(3, max_tokens=2))
    bench.event(StopRequested())
    bench.tick(0.1)
    (report,) = [e.message for e in bench.all(ToRouter)]
    assert isinstance(report, Report) and report.draining
    bench.run(2, request(3))
    assert bench.failed().error.retryable
    bench.steps(2)
    assert bench.to_router()[0] == bench.output() and bench.finished().reason == "length"
    assert bench.effects[-2:] == [ToRouter(WorkerBye()), Exit()]


def test_stop_waits_for_leases_but_not_for_ever() -> None:
    """Guards KV that vanishes under its reader, and a stop that never ends (scenario 62)."""
    bench = Bench()
    bench.reader(HELLO)
    bench.prefill(1, request(5))
    bench.reader(OpenTransfer(transfer=TransferId(1)))
    bench.step()
    bench.event(StopRequested())
    bench.tick(19.0)
    assert bench.all(Exit) == []
    bench.tick(1.0)
    assert [type(m) for m in bench.to_reader()] == [TransferGone]
    assert bench.effects[-2:] == [ToRouter(WorkerBye()), Exit()]
    assert bench.empty()


def test_an_idle_worker_stops_at_once() -> None:
    bench = Bench()
    assert bench.event(StopRequested()) == [ToRouter(WorkerBye()), Exit()]


def test_an_overdue_stop_leaves_a_running_step_alone() -> None:
    bench = Bench()
    bench.run(1, request(20))
    bench.event(StopRequested())
    bench.tick(20.0)
    assert bench.effects[-1] == Exit()
    bench.step()
    assert bench.running is None and bench.empty()
    assert not [m for m in bench.to_router() if isinstance(m, StepOutput)]


def test_a_refused_worker_ends_with_the_routers_sentence() -> None:
    """Guards a misfit that joins the fleet (scenario 17)."""
    bench = Bench()
    refusal = ErrorPayload(code="incompatible_peer", message="kv_dtype: bf16 here, fp32 there")
    bench.said(WorkerRefused(error=refusal))
    assert bench.effects == [Exit("kv_dtype: bf16 here, fp32 there", refused=True)]
