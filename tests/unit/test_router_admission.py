"""The queue in front of the workers, gateways, deadlines, and the end of a router."""

import math

import msgspec
import pytest

from services.router.effects import Note, SendWorker, Stop
from services.router.events import (
    DrainRouter,
    GatewayMessage,
    GatewayUnreachable,
    Tick,
    WorkerExited,
)
from shared.ids import GatewayId, Incarnation
from shared.messages.fleet import OtherVersion
from shared.messages.gateway_router import (
    Drain,
    Ended,
    FleetQuery,
    FleetReply,
    GatewayHello,
    GatewayPing,
    Generate,
    RouterPong,
    RouterWelcome,
    Tokens,
)
from shared.messages.request import Grammar, Sampling
from shared.messages.router_worker import CancelWork, Expect, Prefill, Run
from tests.unit.router_world import ROUTER, SplitWorld, World, make_request


def colocated(sequences: int = 1, **config: object) -> tuple[World, bytes, bytes]:
    """A world whose one worker takes so many requests at a time."""
    world = World(deployment_type="colocated", **config)
    return world, world.gateway(), world.worker("mixed-0", sequences=sequences)


def finish(world: World, mixed: bytes, run: Run) -> None:
    world.finished(mixed, run.dispatch)


def test_18_overload_is_answered_at_once_with_advice_and_stalls_nothing() -> None:
    world, gate, mixed = colocated(max_queue=2)
    world.generate(gate, "a")
    run = world.one(mixed, Run)
    world.generate(gate, "b")
    world.generate(gate, "c")
    assert not world.effects
    world.generate(gate, "d")
    error = world.one(gate, Ended).error
    assert (error.code, error.retryable) == ("overloaded", True) and error.retry_after >= 1
    world.tokens(mixed, run.dispatch, 0, 5)
    assert world.to(gate, Tokens)
    finish(world, mixed, run)
    assert world.one(mixed, Run).request.request_id == "b"
    assert world.state.counters.rejected == 1


def test_the_queue_is_bounded_in_tokens_too_but_takes_any_single_request() -> None:
    world, gate, _ = colocated(max_queued_tokens=1000)
    world.generate(gate, "a")
    world.generate(gate, "huge", 5000)
    assert not world.to(gate)
    world.generate(gate, "b", 10)
    assert world.one(gate, Ended).error.code == "overloaded"


def test_retry_after_follows_the_rate_at_which_the_queue_empties() -> None:
    world, gate, mixed = colocated(max_queue=10)
    for i in range(10):
        world.generate(gate, f"r{i}")
        world.now += 2.0
        (run,) = world.state.legs.by_id.values()
        world.tokens(mixed, run.dispatch, 0, 1)
        finish(world, mixed, run)  # type: ignore[arg-type]
    for i in range(12):
        world.generate(gate, f"s{i}")
    assert world.one(gate, Ended).error.retry_after == pytest.approx(20, abs=3)


def test_tenants_take_turns() -> None:
    """A tenant that queued first and most does not make the others wait for all of it."""
    world, gate, mixed = colocated()
    for name, tenant in [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c1", "c")]:
        world.generate(gate, name, tenant=tenant)
    order = []
    while world.state.legs.by_id:
        (leg,) = world.state.legs.by_id.values()
        order.append(leg.open.request.request_id)
        world.finished(mixed, leg.dispatch)
    assert order == ["a1", "a2", "b1", "c1", "a3"]


def test_a_full_queue_makes_room_for_a_tenant_that_has_nothing_in_it() -> None:
    world, gate, _ = colocated(max_queue=3)
    for i in range(4):
        world.generate(gate, f"a{i}", tenant="a")
    world.generate(gate, "b0", tenant="b")
    ended = world.one(gate, Ended)
    assert (ended.request_id, ended.error.code) == ("a3", "overloaded")
    world.generate(gate, "a4", tenant="a")
    assert world.one(gate, Ended).request_id == "a4"


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    world = World(deployment_type="colocated")
    gate, mixed = world.gateway(), world.worker("mixed-0", blocks=20)
    world.generate(gate, "small-0", 100, tenant="a")
    world.generate(gate, "large", 300, tenant="b")
    world.generate(gate, "small-1", 100, tenant="a")
    assert world.to(mixed, Run), "at first others may pass"
    world.wait(2.5, mixed)
    (first, *_) = world.state.legs.by_id.values()
    world.generate(gate, "small-2", 100, tenant="a")
    world.finished(mixed, first.dispatch)
    assert not world.to(mixed, Run)
    (second,) = world.state.legs.by_id.values()
    world.finished(mixed, second.dispatch)
    assert world.one(mixed, Run).request.request_id == "large"


def test_a_deadline_in_the_queue_ends_the_request() -> None:
    world, gate, mixed = colocated()
    world.generate(gate, "a")
    world.generate(gate, "b", ttl=3.0)
    world.wait(3.5, mixed)
    ended = world.one(gate, Ended)
    assert (ended.request_id, ended.error.code) == ("b", "deadline_exceeded")


def test_a_deadline_while_running_cancels_the_work() -> None:
    world = SplitWorld()
    world.start(ttl=3.0)
    world.wait(3.5, *world.prefills, *world.decodes)
    assert world.one(world.gate, Ended).error.code == "deadline_exceeded"
    assert world.to(world.prefills[0], CancelWork) and world.to(world.decodes[0], CancelWork)
    world.idle()


def test_without_any_worker_requests_end_long_before_their_deadline() -> None:
    """Clients waited ten minutes for a decode worker that was not there."""
    world = World()
    gate = world.gateway()
    world.generate(gate, "a", ttl=4.0)
    world.generate(gate, "b")
    world.wait(2.0)
    assert not world.to(gate)
    world.wait(2.5)
    assert world.one(gate, Ended).error.code == "deadline_exceeded"
    world.wait(25.0)
    assert not world.to(gate)
    assert world.state.wake_at <= world.now + 0.6
    world.wait(1.0)
    error = world.one(gate, Ended).error
    assert error.code == "no_worker" and error.retryable and error.retry_after
    assert "router.no_worker_timeout" in error.message
    world.idle()


def test_a_decode_worker_that_comes_back_in_time_serves_all_that_waited() -> None:
    world = SplitWorld(no_worker_timeout=8.0)
    world.handle(WorkerExited(world.decodes[0]))
    world.generate(world.gate, "a", 10)
    world.wait(7.5, *world.prefills)
    world.generate(world.gate, "b", 10)
    again = world.worker("decode-0", 2)
    assert [m.request.request_id for m in world.to(again, Run)] == ["a", "b"]
    world.handle(WorkerExited(again))
    world.wait(7.5, *world.prefills)
    assert not world.to(world.gate, Ended), "the wait begins anew with every loss"
    world.wait(1.0, *world.prefills)
    codes = [ended.error.code for ended in world.to(world.gate, Ended)]
    assert codes == ["no_worker", "no_worker"]


def test_a_stream_under_way_waits_for_a_worker_as_long_as_it_may_run() -> None:
    """Its client has half an answer, and a decode worker may take long to load."""
    world = SplitWorld(no_worker_timeout=3.0)
    world.generate(world.gate, "a", 10)
    run = world.one(world.decodes[0], Run)
    world.tokens(world.decodes[0], run.dispatch, 0, 50)
    world.handle(WorkerExited(world.decodes[0]))
    world.wait(60.0, *world.prefills)
    assert not world.to(world.gate, Ended)
    again = world.worker("decode-0", 2)
    assert world.one(again, Run).request.output_ids == (50,)


def test_a_dispatch_carries_the_time_that_is_left() -> None:
    world, gate, mixed = colocated()
    world.generate(gate, "a")
    run = world.one(mixed, Run)
    world.generate(gate, "b", ttl=10.0)
    world.now += 4.0
    finish(world, mixed, run)
    assert world.one(mixed, Run).request.ttl == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt_ids": ()}, "prompt"),
        ({"prompt_ids": (-1,)}, "prompt"),
        ({"prompt_ids": (1 << 32,)}, "prompt"),
        (
            {
                "sampling": Sampling(
                    seed=1,
                    max_tokens=1,
                    grammar=Grammar(kind="json_schema", schema="x" * (8 << 20)),
                )
            },
            "prompt",
        ),
    ],
)
def test_what_no_worker_could_take_is_refused(change: dict[str, object], param: str) -> None:
    world, gate, _ = colocated()
    request = msgspec.structs.replace(make_request("r"), **change)
    world.handle(GatewayMessage(gate, Generate(request=request)))
    error = world.one(gate, Ended).error
    assert (error.code, error.param) == ("invalid_request", param)
    assert not world.state.requests.open


@pytest.mark.parametrize("ttl", [0.0, -1.0, math.nan])
def test_a_request_whose_time_is_up_is_refused(ttl: float) -> None:
    world, gate, _ = colocated()
    world.generate(gate, "r", ttl=ttl)
    assert world.one(gate, Ended).error.code == "deadline_exceeded"


def test_51_a_duplicate_id_is_refused_and_the_first_goes_on() -> None:
    """The one end of an id belongs to the request that has it."""
    world, gate, mixed = colocated(sequences=2)
    other = world.gateway("g2")
    world.generate(gate, "r")
    run = world.one(mixed, Run)
    world.generate(other, "r")
    assert world.one(other, Ended).error.code == "invalid_request"
    assert not world.to(gate) and not world.to(mixed)
    world.generate(gate, "r")
    assert not [e for e in world.effects if not isinstance(e, Note)]
    assert world.state.counters.duplicates == 2
    world.tokens(mixed, run.dispatch, 0, 5)
    assert world.to(gate, Tokens)
    finish(world, mixed, run)
    assert world.one(gate, Ended).reason == "length"


def test_a_restarted_router_takes_running_requests_beyond_its_queue() -> None:
    """They were admitted before: a restart must not break streams."""
    world = World(settled=False, max_queue=2)
    gate = world.gateway()
    for i in range(20):
        world.generate(gate, f"r{i}", output=(1, 2, 3))
    assert not world.to(gate) and len(world.state.requests.queue) == 20
    for i in range(8):
        world.generate(gate, f"n{i}")
    assert not world.to(gate), "the ones without a token were admitted before, too"
    world.generate(gate, "too-many")
    assert world.one(gate, Ended).error.code == "overloaded"
    prefill, decode = world.worker("prefill-0"), world.worker("decode-0")
    assert len(world.to(decode, Expect)) == 28
    assert world.to(prefill, Prefill)[0].request.output_ids == (1, 2, 3)
    leg = next(iter(world.state.legs.by_id.values()))
    world.tokens(prefill, leg.dispatch, 3, 9)
    assert [item.index for item in world.one(gate, Tokens).items] == [3]


def test_a_resumed_request_that_is_complete_ends_at_once() -> None:
    world, gate, _ = colocated()
    world.generate(gate, "r", max_tokens=3, output=(1, 2, 3))
    ended = world.one(gate, Ended)
    assert (ended.reason, ended.num_tokens) == ("length", 3)


def test_tokens_of_one_step_go_out_in_one_message_per_gateway() -> None:
    from shared.messages.router_worker import TokenOut

    world, gate, mixed = colocated(sequences=8)
    other = world.gateway("g2")
    runs = []
    for name, peer in [("a", gate), ("b", other), ("c", gate)]:
        world.generate(peer, name)
        runs.append(world.one(mixed, Run).dispatch)
    world.step(mixed, tokens=tuple(TokenOut(dispatch, 0, 5) for dispatch in runs))
    assert [i.request_id for i in world.one(gate, Tokens).items] == ["a", "c"]
    assert [i.request_id for i in world.one(other, Tokens).items] == ["b"]


def test_a_silent_gateway_takes_its_requests_with_it() -> None:
    world = SplitWorld()
    world.start()
    for _ in range(12):
        world.now += 0.5
        for worker in world.state.fleet.by_peer.values():
            worker.last_heard = world.now
        world.handle(Tick())
        if world.to(world.gate, Ended):
            break
    ended = world.one(world.gate, Ended)
    assert ended.reason is None and ended.error is None
    assert world.to(world.prefills[0], CancelWork) and world.to(world.decodes[0], CancelWork)
    world.handle(GatewayMessage(world.gate, GatewayPing()))
    assert not world.effects, "silence makes it say hello, and then it re-submits"
    world.gateway()
    assert world.one(world.gate, RouterWelcome).incarnation == ROUTER
    world.handle(GatewayMessage(world.gate, GatewayPing()))
    assert world.to(world.gate, RouterPong)


def test_an_unreachable_gateway_is_dropped_at_once() -> None:
    world = SplitWorld()
    world.start()
    world.handle(GatewayUnreachable(world.gate))
    assert world.to(world.prefills[0], CancelWork)
    world.idle()
    world.handle(GatewayUnreachable(world.gate))


def test_a_restarted_gateway_cancels_what_its_predecessor_had_open() -> None:
    world = SplitWorld()
    world.start()
    world.gateway("g", 1)
    assert len(world.state.requests.open) == 1, "the same incarnation keeps its requests"
    world.gateway("g", 2)
    assert world.to(world.prefills[0], CancelWork) and world.to(world.decodes[0], CancelWork)
    world.idle()


def test_a_gateway_of_before_a_restart_sees_the_new_incarnation() -> None:
    world = World()
    world.generate(b"g#9", "r")
    assert world.one(b"g#9", RouterPong).incarnation == ROUTER
    assert not world.state.requests.open


def test_a_gateway_of_another_wire_version_is_not_taken_in() -> None:
    world = World()
    hello = GatewayHello(gateway=GatewayId("g"), incarnation=Incarnation(1), wire_version=99)
    world.handle(GatewayMessage(b"g#1", hello))
    assert not world.state.gateways.by_peer and not world.to(b"g#1", RouterWelcome)
    status = world.state.status(world.now)
    assert status.counters.other_versions == 1 and status.other_version == OtherVersion("g", 99)


def test_a_fleet_query_is_answered() -> None:
    world = SplitWorld()
    world.handle(GatewayMessage(world.gate, FleetQuery(query=4)))
    reply = world.one(world.gate, FleetReply)
    assert reply.query == 4 and len(reply.status.workers) == 2


@pytest.mark.parametrize("by_message", [True, False])
def test_61_a_drain_admits_nothing_and_lets_what_runs_finish(by_message: bool) -> None:
    world, gate, mixed = colocated()
    world.generate(gate, "a")
    run = world.one(mixed, Run)
    world.generate(gate, "queued")
    world.handle(GatewayMessage(gate, Drain()) if by_message else DrainRouter())
    assert Stop() not in world.effects and world.state.status(world.now).draining
    world.generate(gate, "late")
    error = world.one(gate, Ended).error
    assert (error.code, error.retryable, error.retry_after) == ("overloaded", True, 30.0)
    finish(world, mixed, run)
    assert Stop() not in world.effects
    finish(world, mixed, world.one(mixed, Run))
    assert world.one(gate, Ended).request_id == "queued" and Stop() in world.effects
    assert world.state.counters.failed == 0


def test_61_a_drain_that_takes_too_long_ends_everything_with_a_word() -> None:
    world, gate, mixed = colocated(drain_timeout=3.0)
    world.generate(gate, "a")
    run = world.one(mixed, Run)
    world.generate(gate, "queued")
    world.handle(DrainRouter())
    world.wait(3.5, mixed)
    assert {e.request_id: e.error.code for e in world.to(gate, Ended)} == {
        "a": "no_worker",
        "queued": "no_worker",
    }
    assert world.one(mixed, CancelWork).dispatch == run.dispatch
    assert Stop() in world.effects
    world.idle()


def test_an_idle_router_drains_at_once() -> None:
    world = World()
    assert Stop() in world.handle(DrainRouter())
    assert not [e for e in world.effects if isinstance(e, SendWorker)]
