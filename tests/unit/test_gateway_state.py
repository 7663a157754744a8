"""The gateway's state machine: exactly one end per request, every token exactly once."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.gateway.events import (
    Abandon,
    Effect,
    FailAll,
    Finished,
    FromRouter,
    NewPromptLogprobs,
    NewTokens,
    Send,
    Stop,
    Submit,
    Tick,
    Unsent,
)
from services.gateway.state import MAX_FAULTS, OUTAGE_LIMIT, SETTLE_TIME, GatewayState
from shared.errors import ErrorCode, ErrorPayload
from shared.ids import GatewayId, Incarnation, RequestId, TenantId
from shared.messages.gateway_router import (
    CancelRequest,
    Ended,
    GatewayHello,
    Generate,
    PromptLogprobs,
    RouterPong,
    RouterWelcome,
    ToGateway,
    TokenItem,
    Tokens,
)
from shared.messages.request import Request, Sampling, TokenLogprob

FIRST, SECOND = Incarnation(11), Incarnation(22)
RID = RequestId("r")


def make(max_open: int = 4, welcomed: bool = True) -> GatewayState:
    state = GatewayState(
        GatewayId("gateway"),
        Incarnation(1),
        max_open=max_open,
        silence=5.0,
        max_model_len=100,
        now=0.0,
    )
    if welcomed:
        state.handle(FromRouter(RouterWelcome(incarnation=FIRST)), 0.0)
    return state


def submit(name: str = "r", max_tokens: int = 8, deadline: float = 100.0) -> Submit:
    sampling = Sampling(seed=1, max_tokens=max_tokens, stop_token_ids=(2,), prompt_logprobs=0)
    request = Request(
        request_id=RequestId(name),
        tenant=TenantId(""),
        prompt_ids=(5, 6, 7),
        sampling=sampling,
        ttl=deadline,
    )
    return Submit(request, deadline)


def generated(effects: list[Effect]) -> list[Request]:
    sent = [e.message for e in effects if isinstance(e, Send)]
    return [message.request for message in sent if isinstance(message, Generate)]


def cancelled(effects: list[Effect]) -> list[str]:
    sent = [e.message for e in effects if isinstance(e, Send)]
    return [message.request_id for message in sent if isinstance(message, CancelRequest)]


def finished(effects: list[Effect]) -> list[Finished]:
    return [effect for effect in effects if isinstance(effect, Finished)]


def received(effects: list[Effect]) -> list[int]:
    return [i.token for e in effects if isinstance(e, NewTokens) for i in e.items]


def tokens(wire: RequestId, *indices: int) -> FromRouter:
    return FromRouter(Tokens(items=tuple(TokenItem(wire, i, 10 + i) for i in indices)))


def say(state: GatewayState, message: ToGateway, now: float = 1.0) -> list[Effect]:
    effects = state.handle(FromRouter(message), now)
    state.check()
    return effects


def started(state: GatewayState, event: Submit | None = None) -> RequestId:
    (request,) = generated(state.handle(event or submit(), 1.0))
    return request.request_id


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


class RandomRouter(RuleBasedStateMachine):
    """Any order of router behaviour: each token once and in order, each request one end."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.state = make(max_open=6, welcomed=False)
        self.sent: dict[RequestId, Request] = {}
        self.known: dict[RequestId, int] = {}
        self.router = Incarnation(100)
        self.output: dict[str, list[int]] = {}
        self.ends: dict[str, int] = {}
        self.gone: set[str] = set()
        self.count = 0

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Generate):
                request = effect.message.request
                assert request.request_id not in self.sent, "a wire id was used twice"
                self.sent[request.request_id] = request
                self.known[request.request_id] = len(request.output_ids)
            elif isinstance(effect, NewTokens):
                got = self.output[effect.request_id]
                for item in effect.items:
                    assert item.index == len(got), "a token came twice or out of order"
                    got.append(item.token)
            elif isinstance(effect, Finished):
                self.ends[effect.request_id] += 1
        self.state.check()

    def do(self, event: object) -> None:
        self.take(self.state.handle(event, self.now))  # type: ignore[arg-type]

    @rule(max_tokens=st.integers(1, 6), life=st.floats(1, 60))
    def new(self, max_tokens: int, life: float) -> None:
        if self.state.refusal(1, self.now) is not None:
            return
        name = f"r{self.count}"
        self.count += 1
        self.output[name], self.ends[name] = [], 0
        self.do(submit(name, max_tokens, self.now + life))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), jump=st.integers(0, 1), size=st.integers(1, 3))
    def some_tokens(self, data: st.DataObject, jump: int, size: int) -> None:
        wire = data.draw(st.sampled_from(sorted(self.known)))
        start = max(0, self.known[wire] + jump - data.draw(st.integers(0, 1)))
        self.known[wire] = start + size
        self.do(tokens(wire, *range(start, start + size)))

    @precondition(lambda self: self.known)
    @rule(
        data=st.data(),
        how=st.sampled_from(["stop", "length", None, "overloaded", "no_worker", "worker_lost"]),
        more=st.integers(0, 1),
    )
    def ended(self, data: st.DataObject, how: str | None, more: int) -> None:
        wire = data.draw(st.sampled_from(sorted(self.known)))
        error = None
        reason = how if how in ("stop", "length") else None
        if how is not None and reason is None:
            error = ErrorPayload(code=how, message="no")  # type: ignore[arg-type]
        count = self.known[wire] + more
        message = Ended(request_id=wire, reason=reason, error=error, num_tokens=count)  # type: ignore[arg-type]
        self.do(FromRouter(message))

    @rule(seconds=st.floats(0.1, 8))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.do(Tick())

    @rule(restarted=st.booleans())
    def welcome(self, restarted: bool) -> None:
        self.router = Incarnation(self.router + restarted)
        self.do(FromRouter(RouterWelcome(incarnation=self.router)))

    @rule(restarted=st.booleans())
    def pong(self, restarted: bool) -> None:
        self.do(FromRouter(RouterPong(incarnation=Incarnation(self.router + restarted))))

    @precondition(lambda self: self.ends)
    @rule(data=st.data(), stop=st.booleans())
    def leave(self, data: st.DataObject, stop: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.ends)))
        if not stop and not self.ends[name]:
            self.gone.add(name)
        self.do(Stop(RequestId(name)) if stop else Abandon(RequestId(name)))

    @invariant()
    def at_most_one_end(self) -> None:
        for name, count in getattr(self, "ends", {}).items():
            assert count + (name in self.gone) <= 1

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        self.now += 1000.0
        self.do(Tick())
        self.do(Tick())
        for name, count in self.ends.items():
            assert count + (name in self.gone) == 1, "a request never ended"
        assert self.state.num_open == 0


TestRandomRouter = RandomRouter.TestCase
TestRandomRouter.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
