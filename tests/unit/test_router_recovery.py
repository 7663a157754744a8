"""Retries and their bounds: what workers do to requests, and what requests do not do to workers."""

import pytest

from services.router.effects import SendWorker
from services.router.events import GatewayMessage, Tick, WorkerExited, WorkerUnreachable
from shared.ids import DispatchId
from shared.messages.gateway_router import CancelRequest, Ended, Tokens
from shared.messages.router_worker import CancelWork, Expect, Prefill, Run, TokenOut
from tests.unit.router_world import SplitWorld, World


def test_9_invalid_requests_never_count_against_a_worker() -> None:
    """100 bad requests of a client must not take the fleet out of service."""
    world = SplitWorld()
    for i in range(100):
        prefill, _ = world.start(f"bad-{i}")
        world.failed(world.prefills[0], prefill.dispatch, "invalid_request", retryable=False)
        assert world.one(world.gate, Ended).error.code == "invalid_request"
    assert world.health(world.prefills[0]) == world.health(world.decodes[0]) == "ready"
    assert world.state.counters.retries == 0
    world.start("good")


def test_retries_are_bounded_and_end_in_a_retryable_error() -> None:
    world = World(deployment_type="colocated", max_retries=3)
    gate, mixed = world.gateway(), world.worker("mixed-0")
    world.generate(gate, "r")
    for attempt in range(4):
        run = world.one(mixed, Run)
        world.failed(mixed, run.dispatch, "worker_lost")
        if attempt < 3 and not world.to(mixed, Run):
            world.wait(3.0, mixed)
    ended = world.one(gate, Ended)
    assert ended.error.code == "worker_lost" and ended.error.retryable
    assert ended.timeline.retries == 3
    world.idle()


def test_retries_in_a_row_are_held_back() -> None:
    """A worker that refuses at once must not burn all attempts within a millisecond."""
    world = World(deployment_type="colocated")
    gate, mixed = world.gateway(), world.worker("mixed-0")
    world.generate(gate, "r")
    world.failed(mixed, world.one(mixed, Run).dispatch)
    world.failed(mixed, world.one(mixed, Run).dispatch)
    assert not world.to(mixed, Run)
    world.now += 0.06
    world.handle(Tick())
    assert world.to(mixed, Run)


def test_a_new_token_renews_the_attempts() -> None:
    """A long stream may outlive more workers than ``max_retries``."""
    world = World(deployment_type="colocated", max_retries=1)
    gate = world.gateway()
    mixed = world.worker("mixed-0")
    world.generate(gate, "r", max_tokens=10)
    for i in range(6):
        run = world.one(mixed, Run)
        assert len(run.request.output_ids) == i
        world.tokens(mixed, run.dispatch, i, 40 + i)
        world.handle(WorkerExited(mixed))
        mixed = world.worker("mixed-0", i + 2)
    assert world.state.counters.failed == 0


def test_tokens_of_prefills_alone_renew_no_attempts() -> None:
    """Guards a request that crawls on, a whole prefill for each token, where KV never arrives."""
    world = SplitWorld(max_retries=2)
    prefill, expect = world.start("r", max_tokens=50)
    for attempt in range(3):
        world.prefilled(world.prefills[0], prefill.dispatch, attempt, 50 + attempt)
        world.lost(world.decodes[0], expect.dispatch, prefill.dispatch)
        if attempt < 2:
            if not world.to(world.prefills[0], Prefill):
                world.wait(3.0, *world.prefills, *world.decodes)
            prefill = world.one(world.prefills[0], Prefill)
            expect = world.one(world.decodes[0], Expect)
            assert len(prefill.request.output_ids) == attempt + 1
    ended = world.one(world.gate, Ended)
    assert (ended.error.code, ended.error.retryable) == ("transfer_failed", True)
    assert (ended.num_tokens, ended.timeline.retries) == (3, 2)
    world.idle()


def test_a_gap_in_the_tokens_is_an_error_of_the_dispatch() -> None:
    world = World(deployment_type="colocated")
    gate, mixed = world.gateway(), world.worker("mixed-0")
    world.generate(gate, "r")
    run = world.one(mixed, Run)
    world.step(mixed, tokens=(TokenOut(run.dispatch, 0, 5), TokenOut(run.dispatch, 2, 7)))
    assert [item.token for item in world.one(gate, Tokens).items] == [5]
    assert world.one(mixed, CancelWork).dispatch == run.dispatch
    assert world.one(mixed, Run).request.output_ids == (5,)


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_a_token_that_cannot_be_one_is_not_passed_on(token: int) -> None:
    world = World(deployment_type="colocated")
    gate, mixed = world.gateway(), world.worker("mixed-0")
    world.generate(gate, "r")
    world.tokens(mixed, world.one(mixed, Run).dispatch, 0, token)
    assert not world.to(gate, Tokens) and world.to(mixed, CancelWork)


def test_more_tokens_than_asked_for_are_not_passed_on() -> None:
    world = World(deployment_type="colocated")
    gate, mixed = world.gateway(), world.worker("mixed-0")
    world.generate(gate, "r", max_tokens=2)
    world.tokens(mixed, world.one(mixed, Run).dispatch, 0, 1, 2, 3)
    ended = world.one(gate, Ended)
    assert (ended.reason, ended.num_tokens) == ("length", 2)
    world.idle()


def test_29_late_and_repeated_messages_change_nothing() -> None:
    """A completion for a freed request must not kill anything."""
    world = SplitWorld()
    prefill, expect = world.start()
    request_id = prefill.request.request_id
    world.handle(GatewayMessage(world.gate, CancelRequest(request_id=request_id)))
    world.prefilled(world.prefills[0], prefill.dispatch, 0, 50)
    world.tokens(world.decodes[0], expect.dispatch, 0, 50, 51)
    world.finished(world.decodes[0], expect.dispatch)
    world.finished(world.decodes[0], expect.dispatch)
    world.failed(world.decodes[0], DispatchId(12345))
    world.lost(world.decodes[0], expect.dispatch, prefill.dispatch)
    world.handle(GatewayMessage(world.gate, CancelRequest(request_id=request_id)))
    assert not world.to(world.gate)
    # two for the prefill (token and word), two tokens, three endings, one transfer, one cancel
    assert world.state.counters.late_messages == 9
    world.idle()


def test_29_repeated_tokens_are_taken_once() -> None:
    world = World(deployment_type="colocated")
    gate, mixed = world.gateway(), world.worker("mixed-0")
    world.generate(gate, "r")
    dispatch = world.one(mixed, Run).dispatch
    world.tokens(mixed, dispatch, 0, 5, 6)
    world.tokens(mixed, dispatch, 0, 5, 6, 7)
    assert [(i.index, i.token) for i in world.one(gate, Tokens).items] == [(2, 7)]


def test_a_worker_cannot_speak_for_the_dispatch_of_another() -> None:
    world = SplitWorld()
    prefill, _ = world.start()
    world.tokens(world.decodes[0], prefill.dispatch, 0, 50)
    assert not world.to(world.gate) and world.state.counters.late_messages == 1


def test_a_failing_worker_is_avoided_while_another_is_there() -> None:
    world = World(deployment_type="colocated")
    gate = world.gateway()
    first, second = world.worker("mixed-0"), world.worker("mixed-1")
    world.generate(gate, "r")
    world.failed(first, world.one(first, Run).dispatch)
    world.failed(second, world.one(second, Run).dispatch)
    world.wait(0.5, first, second)
    assert len(world.to(first, Run)) + len(world.to(second, Run)) == 1


def test_a_request_that_is_complete_is_not_sent_to_another_worker() -> None:
    """The worker died between its last token and its word that it had finished."""
    world = World(deployment_type="colocated")
    gate, mixed = world.gateway(), world.worker("mixed-0")
    world.generate(gate, "r", max_tokens=2)
    world.tokens(mixed, world.one(mixed, Run).dispatch, 0, 5, 6)
    world.handle(WorkerExited(mixed))
    assert world.one(gate, Ended).reason == "length"
    world.idle()


def test_a_dispatch_that_an_idle_worker_does_not_have_is_sent_again() -> None:
    """A message lost with a broken connection must not make a request wait for its deadline."""
    world = World(deployment_type="colocated")
    gate, mixed = world.gateway(), world.worker("mixed-0")
    world.generate(gate, "r")
    run = world.one(mixed, Run)
    world.wait(2.0, mixed)
    world.report(mixed, running=1, busy=True)
    assert not world.to(mixed)
    world.wait(2.0, mixed)
    world.report(mixed)
    assert world.one(mixed, CancelWork).dispatch == run.dispatch
    assert world.to(mixed, Run)


def test_work_of_an_unreachable_worker_moves_and_is_cancelled_when_it_is_back() -> None:
    world = SplitWorld(prefills=2)
    prefill, _ = world.start()
    world.handle(WorkerUnreachable(world.prefills[0]))
    assert world.health(world.prefills[0]) == "lost" and world.to(world.prefills[1], Prefill)
    world.report(world.prefills[0])
    assert world.health(world.prefills[0]) == "ready"
    assert world.one(world.prefills[0], CancelWork).dispatch == prefill.dispatch


def test_no_decode_left_waits_for_one() -> None:
    world = SplitWorld()
    prefill, expect = world.start()
    world.prefilled(world.prefills[0], prefill.dispatch, 0, 50)
    world.tokens(world.decodes[0], expect.dispatch, 0, 50, 51)
    world.handle(WorkerExited(world.decodes[0]))
    assert not [e for e in world.effects if isinstance(e, SendWorker)]
    assert not world.to(world.gate)
    again = world.worker("decode-0", 2)
    assert world.one(again, Expect).request.output_ids == (50, 51)
