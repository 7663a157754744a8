"""The gateway's state machine under any order of router behaviour."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.gateway.events import (
    Abandon,
    Effect,
    Finished,
    FromRouter,
    NewTokens,
    Send,
    Stop,
    Tick,
)
from shared.errors import ErrorPayload
from shared.ids import Incarnation, RequestId
from shared.messages.gateway_router import Ended, Generate, RouterPong, RouterWelcome
from shared.messages.request import Request
from tests.unit.gateway_machine import make, submit, tokens


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
        assert self.state.wake_at >= self.now, "it would tick for ever"

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
