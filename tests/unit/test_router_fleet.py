"""Membership and health of workers."""

import msgspec
import pytest

from services.router.effects import UnwatchProcess, WatchProcess
from services.router.events import (
    ChangeRole,
    DrainWorkerRequested,
    GatewayMessage,
    Tick,
    WorkerExited,
    WorkerMessage,
)
from shared.ids import DispatchId, WorkerId
from shared.messages.gateway_router import Ended, GatewayPing
from shared.messages.hello import WIRE_VERSION
from shared.messages.router_worker import (
    CancelWork,
    Drained,
    DrainWorker,
    Expect,
    Prefill,
    RouterBeat,
    Run,
    SetRole,
    TokenOut,
    WorkerBye,
    WorkerRefused,
    WorkerWelcome,
)
from tests.unit.router_world import COMPATIBILITY, ROUTER, SplitWorld, World


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "other"), ("block_size", 32), ("kv_dtype", "fp8"), ("layout", "x")],
)
def test_17_45_a_worker_that_does_not_fit_is_refused_by_name_of_the_field(
    field: str, value: object
) -> None:
    """Found at registration, not at the first transfer."""
    world = World()
    world.worker("prefill-0")
    other = msgspec.structs.replace(COMPATIBILITY, **{field: value})
    decode = world.worker("decode-0", compatibility=other)
    refusal = world.one(decode, WorkerRefused)
    assert refusal.error.code == "incompatible_peer"
    assert field in refusal.error.message and repr(value) in refusal.error.message
    assert decode not in world.state.fleet.by_peer


@pytest.mark.parametrize("first", ["fp32", "int8"])
def test_17_workers_whose_kv_is_converted_fit_one_another(first: str) -> None:
    """A decode worker that keeps int8 beside a prefill worker of bf16, whichever comes first."""
    world = World()
    for name, dtype in (("prefill-0", first), ("decode-0", "bf16"), ("decode-1", "int8")):
        other = msgspec.structs.replace(COMPATIBILITY, kv_dtype=dtype)
        peer = world.worker(name, compatibility=other)
        assert peer in world.state.fleet.by_peer
    world.state.fleet.check()


def test_45_another_wire_version_is_refused_even_from_the_first_worker() -> None:
    world = World()
    other = msgspec.structs.replace(COMPATIBILITY, wire_version=WIRE_VERSION + 1)
    assert (
        "wire_version"
        in world.one(world.worker("decode-0", compatibility=other), WorkerRefused).error.message
    )


def test_the_last_worker_takes_the_definition_of_the_fleet_with_it() -> None:
    world = World()
    first = world.worker("prefill-0")
    other = msgspec.structs.replace(COMPATIBILITY, model="new")
    world.handle(WorkerExited(first))
    newer = world.worker("prefill-0", 2, compatibility=other)
    assert world.one(newer, WorkerWelcome).incarnation == ROUTER


def test_a_silent_worker_that_returns_to_another_fleet_is_refused() -> None:
    world = World()
    old = world.worker("prefill-0")
    world.wait(6.0)
    assert world.health(old) == "lost"
    world.worker("prefill-1", compatibility=msgspec.structs.replace(COMPATIBILITY, model="new"))
    world.report(old)
    assert world.to(old, WorkerRefused) and old not in world.state.fleet.by_peer


def test_a_worker_without_blocks_is_refused() -> None:
    world = World()
    assert world.to(world.worker("decode-0", blocks=0), WorkerRefused)


def test_a_new_incarnation_replaces_the_old_one_and_its_cache() -> None:
    """A restart at the same address must not inherit work or a prefix index."""
    world = SplitWorld()
    prefill, _ = world.start()
    again = world.worker("prefill-0", 2)
    assert world.prefills[0] not in world.state.fleet.by_peer
    assert UnwatchProcess(world.prefills[0]) in world.effects
    assert any(isinstance(e, WatchProcess) and e.peer == again for e in world.effects)
    run = world.one(world.decodes[0], Run)
    assert run.request.request_id == prefill.request.request_id
    assert len(world.state.fleet.by_peer[again].prefix) == 0


def test_a_repeated_hello_keeps_the_work() -> None:
    world = SplitWorld()
    world.start()
    world.worker("prefill-0")
    assert world.to(world.prefills[0], WorkerWelcome) and not world.to(world.prefills[0])
    assert len(world.state.legs.by_id) == 2


def test_a_worker_of_before_a_restart_sees_the_new_incarnation() -> None:
    world = World()
    world.report(b"prefill-0#5")
    assert world.one(b"prefill-0#5", RouterBeat).incarnation == ROUTER
    world.tokens(b"prefill-0#5", DispatchId(1), 0, 1)
    assert not world.effects and not world.state.fleet.by_peer


def test_a_worker_taken_out_of_the_table_comes_back_by_silence_and_hello() -> None:
    """It was answered by beats of the router it knew, so it never introduced itself again."""
    world = SplitWorld()
    prefill, _ = world.start()
    usurper = world.worker("prefill-0", 2)
    world.handle(WorkerMessage(usurper, WorkerBye()))
    world.report(world.prefills[0])
    assert not world.to(world.prefills[0]), "silence is what makes it say hello"
    again = world.worker("prefill-0")
    assert world.to(again, WorkerWelcome) and world.health(again) == "ready"
    assert [m.dispatch for m in world.to(again, CancelWork)] == [prefill.dispatch]


def test_a_replaced_process_that_returns_does_not_take_the_name_back() -> None:
    """Two processes under one name would push each other out for ever."""
    world = SplitWorld()
    successor = world.worker("prefill-0", 2)
    world.worker("prefill-0")
    refused = world.one(world.prefills[0], WorkerRefused)
    assert "another process has taken the name prefill-0" in refused.error.message
    assert world.health(successor) == "ready"


def test_silence_moves_the_work_and_any_message_brings_the_worker_back() -> None:
    world = SplitWorld(prefills=2)
    prefill, _ = world.start()
    world.wait(6.0, world.prefills[1], world.decodes[0])
    assert world.health(world.prefills[0]) == "lost"
    assert world.to(world.prefills[1], Prefill)
    assert not world.to(world.prefills[0], CancelWork)
    world.tokens(world.prefills[0], prefill.dispatch, 0, 50)
    assert world.health(world.prefills[0]) == "ready"
    assert world.one(world.prefills[0], CancelWork).dispatch == prefill.dispatch
    assert not world.to(world.gate)


def test_a_hung_worker_loses_its_work_and_returns_when_it_steps() -> None:
    world = SplitWorld(prefills=2, hung_after=3.0)
    prefill, _ = world.start()
    world.report(world.prefills[0], 7, busy=True, waiting=1)
    world.wait(3.5, *world.prefills, *world.decodes)
    assert world.health(world.prefills[0]) == "hung"
    assert world.one(world.prefills[0], CancelWork).dispatch == prefill.dispatch
    assert world.to(world.prefills[1], Prefill)
    world.report(world.prefills[0], 7, busy=True)
    assert world.health(world.prefills[0]) == "hung"
    world.report(world.prefills[0], 8, busy=True)
    assert world.health(world.prefills[0]) == "ready"


def test_an_idle_worker_with_a_standing_step_is_not_hung() -> None:
    world = SplitWorld(hung_after=3.0)
    for _ in range(5):
        world.report(world.prefills[0], 7)
        world.wait(1.0, *world.prefills, *world.decodes)
    assert world.health(world.prefills[0]) == "ready"
    world.report(world.prefills[0], 7, busy=True)
    world.handle(Tick())
    assert world.health(world.prefills[0]) == "ready", "it has only just become busy"


def test_55_a_burst_makes_no_worker_unhealthy() -> None:
    """12 288 requests at once: queued or refused with advice, and everybody stays ready."""
    world = SplitWorld(max_queue=256)
    world.checked = False
    refused = 0
    for i in range(12_288):
        world.generate(world.gate, f"r{i}", [i % 5000 + 1] * 65, max_tokens=4)
        for ended in world.to(world.gate, Ended):
            refused += 1
            assert ended.error.code == "overloaded" and ended.error.retry_after >= 1
    world.checked = True
    world.handle(Tick())
    assert len(world.state.requests.queue) == 256 and refused == 12_288 - 256 - 64
    assert world.health(world.prefills[0]) == world.health(world.decodes[0]) == "ready"


def test_18_a_stall_of_the_router_is_not_held_against_the_workers() -> None:
    """After standing still the router has heard nobody, which says nothing about anybody."""
    world = SplitWorld()
    world.start()
    world.now += 60.0
    world.handle(Tick())
    assert world.health(world.prefills[0]) == world.health(world.decodes[0]) == "ready"
    assert world.gate in world.state.gateways.by_peer
    world.wait(5.5)
    assert world.health(world.prefills[0]) == "lost"


def test_61_a_stopping_worker_finishes_and_gets_nothing_new() -> None:
    """Scaling down must not abort what runs."""
    world = SplitWorld(decodes=2)
    prefill, expect = world.start()
    world.report(world.decodes[0], draining=True, receiving=1)
    assert world.health(world.decodes[0]) == "draining"
    world.generate(world.gate, "next")
    assert world.to(world.decodes[1], Expect) and not world.to(world.decodes[0])
    world.prefilled(world.prefills[0], prefill.dispatch, 0, 50)
    world.finished(world.decodes[0], expect.dispatch, TokenOut(expect.dispatch, 1, 51))
    assert world.one(world.gate, Ended).error is None
    world.handle(WorkerMessage(world.decodes[0], WorkerBye()))
    assert world.decodes[0] not in world.state.fleet.by_peer
    assert world.state.counters.retries == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_61_what_a_leaving_worker_has_open_is_handed_over(role: str) -> None:
    world = SplitWorld(prefills=2, decodes=2)
    world.start()
    leaver = world.prefills[0] if role == "prefill" else world.decodes[0]
    world.handle(WorkerMessage(leaver, WorkerBye()))
    assert not world.to(world.gate)
    assert len(world.state.legs.by_id) == 2
    assert all(leg.worker.peer != leaver for leg in world.state.legs.by_id.values())


def test_61_a_drain_on_order_empties_and_the_role_changes() -> None:
    world = SplitWorld(decodes=2)
    _, expect = world.start()
    world.handle(ChangeRole(WorkerId("decode-0"), "prefill"))
    assert world.to(world.decodes[0], DrainWorker)
    world.generate(world.gate, "next")
    assert world.to(world.decodes[1], Expect)
    world.finished(world.decodes[0], expect.dispatch)
    assert world.one(world.gate, Ended).error is None
    world.handle(WorkerMessage(world.decodes[0], Drained()))
    assert world.one(world.decodes[0], SetRole).role == "prefill"
    worker = world.state.fleet.by_peer[world.decodes[0]]
    assert (worker.health, worker.role) == ("ready", "prefill")


def test_a_report_from_before_the_change_of_role_does_not_keep_the_worker_out() -> None:
    """Its heartbeats say ``draining`` for a drain from here, too."""
    world = SplitWorld()
    world.handle(ChangeRole(WorkerId("decode-0"), "decode"))
    world.report(world.decodes[0], draining=True)
    world.handle(WorkerMessage(world.decodes[0], Drained()))
    assert world.health(world.decodes[0]) == "ready"
    world.report(world.decodes[0], draining=True)
    assert world.health(world.decodes[0]) == "draining"
    world.report(world.decodes[0])
    assert world.health(world.decodes[0]) == "ready"


def test_a_drained_worker_stays_out_until_it_is_given_a_role() -> None:
    world = SplitWorld()
    world.handle(DrainWorkerRequested(WorkerId("decode-0")))
    world.handle(WorkerMessage(world.decodes[0], Drained()))
    world.generate(world.gate, "r")
    assert not world.to(world.decodes[0])
    world.handle(ChangeRole(WorkerId("decode-0"), "decode"))
    assert world.to(world.decodes[0], SetRole) and world.to(world.decodes[0], Expect)


def test_draining_an_unknown_worker_does_nothing() -> None:
    world = World()
    world.handle(DrainWorkerRequested(WorkerId("decode-9")))
    assert not world.state.fleet.by_peer


def test_a_drain_of_what_is_no_worker_names_those_there_are() -> None:
    """Guards a sentence that calls the router a worker, and leaves out what can be drained."""
    world = SplitWorld(decodes=3)
    world.report(world.decodes[2], draining=True)
    assert world.state.drains.order(WorkerId("decode-1"), None) is None
    for name in ("router", "decode-2"):
        error = world.state.drains.order(WorkerId(name), None)
        assert error is not None and (error.code, error.param) == ("not_found", "worker")
        assert error.message == (
            f"{name} cannot be drained: only workers can, and those here now are: "
            "decode-0, decode-1, prefill-0"
        )


def test_beats_come_every_second() -> None:
    world = SplitWorld()
    effects = world.wait(3.0, *world.prefills, *world.decodes)
    assert effects and len(world.to(world.decodes[0], RouterBeat)) == 3


def test_status_tells_what_the_router_knows() -> None:
    world = SplitWorld()
    world.start()
    world.report(world.decodes[0], 3, receiving=1, blocks_total=10)
    world.now += 0.25
    status = world.state.status(world.now)
    assert [w.worker for w in status.workers] == ["decode-0", "prefill-0"]
    assert status.workers[0].load.receiving == 1 and status.workers[0].age == 0.25
    assert (status.open_requests, status.queued, status.draining) == (1, 0, False)
    assert status.counters.decisions == {"split": 1}


def test_an_idle_router_wants_to_wake_for_its_beats_only() -> None:
    """It looked at every deadline twenty times a second, which cost more than its work."""
    world = SplitWorld()
    woken = 0
    end = world.now + 10.0
    while world.state.wake_at < end:
        world.now = max(world.now, world.state.wake_at)
        for peer in (*world.prefills, *world.decodes):
            world.report(peer)
        world.handle(GatewayMessage(world.gate, GatewayPing()))
        world.handle(Tick())
        woken += 1
    assert woken <= 11


def test_every_deadline_wakes_the_router_in_time() -> None:
    world = SplitWorld(worker_timeout=3.25, hung_after=0.75)
    world.generate(world.gate, "r", ttl=0.5)
    assert world.state.wake_at <= world.now + 0.5
    world.now = world.state.wake_at
    world.handle(Tick())
    assert world.one(world.gate, Ended).error.code == "deadline_exceeded"
    world.report(world.decodes[0], 1, busy=True)
    assert world.state.wake_at <= world.now + 0.75
    while world.health(world.prefills[0]) == "ready":
        assert world.now <= world.state.wake_at <= world.now + 1.0
        world.now = world.state.wake_at + 0.001
        world.handle(Tick())
        world.handle(GatewayMessage(world.gate, GatewayPing()))
    assert world.now - world.state.fleet.by_peer[world.prefills[0]].last_heard < 3.3
    assert world.health(world.decodes[0]) == "hung"
