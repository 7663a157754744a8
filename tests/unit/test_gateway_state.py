"""The gateway's state machine: exactly one end per request, every token exactly once."""

import pytest

from services.gateway.events import (
    Abandon,
    Effect,
    FailAll,
    FromRouter,
    NewPromptLogprobs,
    Send,
    Stop,
    Tick,
    Unsent,
)
from services.gateway.state import (
    MAX_FAULTS,
    OUTAGE_LIMIT,
    SETTLE_TIME,
    STOP_TIMEOUT,
    GatewayState,
)
from shared.errors import ErrorCode, ErrorPayload
from shared.ids import RequestId
from shared.messages.gateway_router import (
    Ended,
    GatewayHello,
    PromptLogprobs,
    RouterPong,
    RouterWelcome,
)
from shared.messages.request import TokenLogprob
from tests.unit.gateway_machine import (
    FIRST,
    RID,
    SECOND,
    cancelled,
    finished,
    generated,
    make,
    received,
    say,
    started,
    submit,
    tokens,
)


def test_tokens_are_taken_once_and_in_order() -> None:
    """A router that repeats tokens after a reconnect must not duplicate them at the client."""
    state = make()
    wire = started(state)
    assert received(state.handle(tokens(wire, 0, 1), 1.0)) == [10, 11]
    assert received(state.handle(tokens(wire, 0, 1, 2), 1.0)) == [12]
    assert state.counters.duplicates == 2
    (done,) = finished(say(state, Ended(request_id=wire, reason="length", num_tokens=3)))
    assert (done.reason, done.error) == ("length", None)
    assert state.num_open == 0


def test_new_router_gets_the_rest_of_every_open_request() -> None:
    """A router restart mid-stream must neither lose nor duplicate a token."""
    state = make()
    wire = started(state)
    state.handle(tokens(wire, 0, 1), 1.0)
    effects = say(state, RouterPong(incarnation=SECOND))
    assert [type(e.message) for e in effects if isinstance(e, Send)] == [GatewayHello]
    effects = say(state, RouterWelcome(incarnation=SECOND), 3.0)
    (rest,) = generated(effects)
    assert cancelled(effects) == [wire]
    assert rest.request_id != wire
    assert rest.output_ids == (10, 11)
    assert rest.ttl == pytest.approx(97.0)
    assert received(state.handle(tokens(wire, 2), 3.0)) == []
    assert received(state.handle(tokens(rest.request_id, 2), 3.0)) == [12]


def test_an_idle_gateway_wants_to_wake_for_its_beats_only() -> None:
    state, now, woken = make(), 0.0, 0
    while now < 10.0:
        now = max(now, state.wake_at)
        state.handle(Tick(), now)
        say(state, RouterPong(incarnation=FIRST), now)
        woken += 1
    assert woken <= 12


def test_every_deadline_of_a_request_wakes_the_gateway() -> None:
    state = make()
    state.handle(Tick(), 0.0)
    state.handle(submit(deadline=0.5), 0.0)
    assert state.wake_at <= 0.5
    assert finished(state.handle(Tick(), state.wake_at))
    wire = started(state)
    state.handle(tokens(wire, 0), 0.6)
    error = ErrorPayload(code="overloaded", message="full", retryable=True)
    say(state, Ended(request_id=wire, error=error), 0.6)
    (again,) = generated(state.handle(Tick(), 1.0 + state.wake_at))
    assert again.output_ids == (10,)
    state.handle(Stop(RID), 2.0)
    assert state.wake_at <= 2.0 + STOP_TIMEOUT


def test_silent_router_is_greeted_and_gets_everything_again() -> None:
    """A router that lost our messages without restarting must not leave requests hanging."""
    state = make()
    started(state)
    effects = state.handle(Tick(), 5.5)
    assert not state.connected
    hellos = [e for e in effects if isinstance(e, Send) and isinstance(e.message, GatewayHello)]
    assert len(hellos) == 1
    assert len(generated(say(state, RouterWelcome(incarnation=FIRST), 6.0))) == 1


def test_submissions_wait_for_the_first_welcome() -> None:
    state = make(welcomed=False)
    assert generated(state.handle(submit(), 0.1)) == []
    assert len(generated(say(state, RouterWelcome(incarnation=FIRST)))) == 1


def test_gap_is_repaired_by_asking_again() -> None:
    """A token lost on the way must be generated again, not skipped."""
    state = make()
    wire = started(state)
    effects = state.handle(tokens(wire, 0, 2, 3), 1.0)
    assert received(effects) == [10]
    (rest,) = generated(effects)
    assert rest.output_ids == (10,)


def test_end_that_counts_more_tokens_than_came_is_a_gap() -> None:
    state = make()
    wire = started(state)
    state.handle(tokens(wire, 0), 1.0)
    effects = say(state, Ended(request_id=wire, reason="stop", num_tokens=2))
    assert not finished(effects)
    assert generated(effects)[0].output_ids == (10,)


def test_endless_gaps_end_the_request() -> None:
    """A router that never delivers must not be asked for ever."""
    state = make()
    wire = started(state)
    for _ in range(MAX_FAULTS):
        (again,) = generated(state.handle(tokens(wire, 5), 1.0))
        wire = again.request_id
    (done,) = finished(state.handle(tokens(wire, 5), 1.0))
    assert done.error is not None and done.error.code == "worker_lost"


def test_whole_output_whose_end_was_lost_is_not_generated_again() -> None:
    """All tokens arrived, the router died before its last word: the client gets its end."""
    state = make()
    wire = started(state, submit(max_tokens=2))
    state.handle(tokens(wire, 0, 1), 1.0)
    effects = say(state, RouterWelcome(incarnation=SECOND))
    assert not generated(effects)
    assert finished(effects)[0].reason == "length"


def test_tokens_past_max_tokens_are_dropped() -> None:
    state = make()
    wire = started(state, submit(max_tokens=2))
    assert received(state.handle(tokens(wire, 0, 1, 2), 1.0)) == [10, 11]


def test_stop_string_keeps_usage_and_hides_later_tokens() -> None:
    """Tokens that raced with the cancel must not reach the client; cached_tokens must."""
    state = make()
    wire = started(state)
    state.handle(tokens(wire, 0), 1.0)
    assert cancelled(state.handle(Stop(RID), 1.0)) == [wire]
    assert received(state.handle(tokens(wire, 1), 1.0)) == []
    (done,) = finished(say(state, Ended(request_id=wire, num_cached_tokens=3)))
    assert (done.reason, done.num_cached_tokens) == ("stop", 3)


@pytest.mark.parametrize("last", ["tick", "welcome", "error"])
def test_stopped_request_ends_even_if_the_router_says_nothing(last: str) -> None:
    state = make()
    wire = started(state)
    state.handle(Stop(RID), 1.0)
    if last == "tick":
        effects = state.handle(Tick(), 4.0)
    elif last == "welcome":
        effects = say(state, RouterWelcome(incarnation=SECOND))
    else:
        error = ErrorPayload(code="worker_lost", message="x")
        effects = say(state, Ended(request_id=wire, error=error))
    (done,) = finished(effects)
    assert (done.reason, done.error) == ("stop", None)
    assert not generated(effects)


def test_abandoned_request_is_cancelled_and_forgotten() -> None:
    state = make()
    wire = started(state)
    assert cancelled(state.handle(Abandon(RID), 1.0)) == [wire]
    assert say(state, Ended(request_id=wire)) == []
    assert state.num_open == 0


def test_deadline_ends_a_request() -> None:
    state = make()
    started(state, submit(deadline=3.0))
    (done,) = finished(state.handle(Tick(), 3.0))
    assert done.error is not None and done.error.code == "deadline_exceeded"


def test_table_is_bounded() -> None:
    """More open requests than max_open must be refused, not queued without limit."""
    state = make(max_open=1)
    started(state)
    assert state.refusal(1, 1.0) is not None
    (done,) = finished(state.handle(submit("other"), 1.0))
    assert done.error is not None and done.error.code == "overloaded"
    state.check()


def test_long_outage_ends_what_waits_and_refuses_new() -> None:
    state = make(welcomed=False)
    state.handle(submit(), 0.0)
    (done,) = finished(state.handle(Tick(), OUTAGE_LIMIT + 1))
    assert done.error is not None and done.error.code == "no_worker"
    assert state.refusal(1, OUTAGE_LIMIT + 1) is not None


def refuse(state: GatewayState, wire: RequestId, code: ErrorCode, now: float) -> list[Effect]:
    error = ErrorPayload(code=code, message="later", retryable=True)
    return say(state, Ended(request_id=wire, error=error), now)


def test_resumed_stream_survives_a_router_without_room() -> None:
    """A stream under way must not end with 429 because a fresh router is full for a moment."""
    state = make()
    wire = started(state)
    state.handle(tokens(wire, 0), 1.0)
    (rest,) = generated(say(state, RouterWelcome(incarnation=SECOND)))
    assert refuse(state, rest.request_id, "overloaded", 2.0) == []
    (again,) = generated(state.handle(Tick(), 2.6))
    assert again.output_ids == (10,)


def test_new_request_waits_for_workers_only_while_the_router_is_fresh() -> None:
    state = make()
    wire = started(state)
    assert refuse(state, wire, "no_worker", 2.0) == []
    (again,) = generated(state.handle(Tick(), 2.6))
    late = SETTLE_TIME + 1
    state.handle(FromRouter(RouterPong(incarnation=FIRST)), late)
    assert len(finished(refuse(state, again.request_id, "overloaded", late))) == 0
    fresh = started_at(state, "new", late)
    (done,) = finished(refuse(state, fresh, "no_worker", late))
    assert done.error is not None and done.error.code == "no_worker"


def started_at(state: GatewayState, name: str, now: float) -> RequestId:
    return generated(state.handle(submit(name), now))[0].request_id


def test_prompt_logprobs_come_once_and_are_not_asked_for_again() -> None:
    state = make()
    wire = started(state)
    message = PromptLogprobs(request_id=wire, items=(TokenLogprob(-1.0),) * 2)
    effects = say(state, message)
    assert [type(e) for e in effects] == [NewPromptLogprobs]
    assert say(state, message) == []
    (rest,) = generated(say(state, RouterWelcome(incarnation=SECOND)))
    assert rest.sampling.prompt_logprobs is None


def test_message_the_link_did_not_take_is_sent_again() -> None:
    state = make()
    wire = started(state)
    state.handle(Unsent(wire), 1.0)
    state.check()
    assert len(generated(state.handle(Tick(), 1.6))) == 1


def test_failing_all_gives_each_its_one_end() -> None:
    state = make()
    started(state)
    state.handle(submit("other"), 1.0)
    error = ErrorPayload(code="cancelled", message="going")
    assert len(finished(state.handle(FailAll(error), 1.0))) == 2
    state.check()
    assert state.num_open == 0
