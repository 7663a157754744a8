"""The client's state machine, one rule at a time."""

import pytest

from diptych.events import (
    Abort,
    Ask,
    Dial,
    Effect,
    Emit,
    Event,
    HangUp,
    Leave,
    LinkDown,
    LinkTrouble,
    LinkUp,
    Open,
    Oversized,
    Ready,
    Received,
    Send,
    Tick,
)
from diptych.open_request import Failed, Finished, Output
from diptych.state import ClientLimits, ClientState
from diptych.wire import (
    Accepted,
    Bye,
    Cancel,
    ClientHello,
    Delta,
    DeltaItem,
    Ended,
    Logprob,
    Ping,
    Pong,
    PromptLogprobs,
    Refused,
    SamplingParams,
    Submit,
    ToClient,
    Welcome,
    WireError,
)


class Driver:
    """Feeds a state and keeps what came out, by kind."""

    def __init__(self, **limits: float) -> None:
        self.state = ClientState(7, "ipc://gw", "key", ClientLimits(**limits))  # type: ignore[arg-type]
        self.now = 0.0
        self.feed(Tick())

    def feed(self, event: Event, after: float = 0.0) -> list[Effect]:
        self.now += after
        effects = self.state.handle(event, self.now)
        self.state.check()
        return effects

    def connect(self, model: str = "m") -> list[Effect]:
        self.feed(LinkUp(self.state.session))
        return self.get(
            Welcome(incarnation=1, session=self.state.session, model=model, max_model_len=9)
        )

    def get(self, message: ToClient) -> list[Effect]:
        return self.feed(Received(self.state.session, message))

    def open(
        self, key: int = 1, timeout: float = 100.0, prompt_logprobs: int | None = None
    ) -> list[Effect]:
        params = SamplingParams(prompt_logprobs=prompt_logprobs)
        submit = Submit(id=0, prompt="p", params=params)
        return self.feed(Open(key, submit, self.now + timeout))

    def reconnect(self, model: str = "m") -> list[Effect]:
        self.feed(LinkDown(self.state.session, "cut"))
        self.feed(Tick(), after=2.0)
        return self.connect(model)


def delta(id_: int, index: int, *tokens: int, text_at: int = 0, text: str = "") -> Delta:
    return Delta(items=(DeltaItem(id_, index, tokens, text_at, text),))


def accept(id_: int) -> Accepted:
    return Accepted(id=id_, seed=5, prompt_tokens=2, prompt_ids=(8, 9))


def failure(effects: list[Effect]) -> WireError:
    (emit,) = [e for e in effects if isinstance(e, Emit)]
    assert isinstance(emit.update, Failed)
    return emit.update.error


def sent(effects: list[Effect]) -> list[object]:
    return [e.message for e in effects if isinstance(e, Send)]


def test_hello_comes_first_and_requests_wait_for_the_welcome() -> None:
    driver = Driver()
    assert driver.state.session == 1
    assert driver.open() == []
    hello = ClientHello(wire_version=1, incarnation=7, session=1, api_key="key")
    assert driver.feed(LinkUp(1)) == [Send(hello)]
    (submit,) = sent(driver.connect())
    assert isinstance(submit, Submit) and submit.id == 1 and submit.timeout == 100.0


def test_a_resume_carries_tokens_seed_and_prompt_ids_under_a_new_id() -> None:
    driver = Driver()
    driver.connect()
    driver.open(prompt_logprobs=0)
    driver.get(accept(1))
    driver.get(PromptLogprobs(id=1, items=(Logprob(9, "x", -1.0),)))
    driver.get(delta(1, 0, 10, 11, text="ab"))
    (submit,) = sent(driver.reconnect())
    assert submit == Submit(
        id=2,
        token_ids=(8, 9),
        params=SamplingParams(seed=5),
        received=(10, 11),
        timeout=98.0,
    )
    assert driver.get(delta(1, 2, 12)) == [], "the earlier attempt must be ignored"
    driver.get(accept(2))
    (emit,) = driver.get(delta(2, 1, 11, 12, text_at=1, text="bc"))
    assert emit == Emit(1, Output(2, (12,), "c", None))
    end = Ended(id=2, reason="stop", num_tokens=3, text_at=3, text="!")
    (emit,) = driver.get(end)
    assert isinstance(emit, Emit) and isinstance(emit.update, Finished)
    assert emit.update.text == "!" and emit.update.resumes == 1


def test_logprobs_of_doubled_tokens_are_dropped_with_them() -> None:
    driver = Driver()
    driver.connect()
    driver.open()
    driver.get(accept(1))
    scores = tuple(Logprob(t, str(t), -1.0) for t in (1, 2, 3))
    driver.get(Delta(items=(DeltaItem(1, 0, (1, 2), 0, "", scores[:2]),)))
    (emit,) = driver.get(Delta(items=(DeltaItem(1, 1, (2, 3), 0, "", scores[1:]),)))
    assert emit == Emit(1, Output(2, (3,), "", scores[2:]))


@pytest.mark.parametrize(
    "message",
    [delta(1, 2, 12, text_at=1), delta(1, 1, 11, text_at=2), accept(0)],
    ids=["token gap", "text gap", "other id"],
)
def test_a_gap_cancels_the_attempt_and_submits_the_rest(message: ToClient) -> None:
    driver = Driver()
    driver.connect()
    driver.open()
    driver.get(accept(1))
    driver.get(delta(1, 0, 10, text="a"))
    messages = sent(driver.get(message))
    if isinstance(message, Accepted):
        assert messages == []
    else:
        assert messages[0] == Cancel(id=1)
        assert isinstance(messages[1], Submit) and messages[1].received == (10,)


def test_output_before_accepted_is_a_gap() -> None:
    driver = Driver()
    driver.connect()
    driver.open()
    assert sent(driver.get(delta(1, 0, 10)))[0] == Cancel(id=1)


def test_an_end_that_counts_more_tokens_than_came_is_a_gap() -> None:
    driver = Driver()
    driver.connect()
    driver.open()
    driver.get(accept(1))
    (submit,) = sent(driver.get(Ended(id=1, reason="stop", num_tokens=1)))
    assert isinstance(submit, Submit) and submit.id == 2


def test_a_request_without_progress_is_given_up() -> None:
    driver = Driver(max_stalls=3)
    driver.connect()
    driver.open()
    driver.reconnect()
    driver.reconnect()
    assert failure(driver.reconnect()).code == "connection_lost"
    assert not driver.state.requests


def test_a_stream_does_not_go_on_with_another_model() -> None:
    driver = Driver()
    driver.connect()
    driver.open()
    driver.get(accept(1))
    driver.get(delta(1, 0, 10))
    assert "now serves 'other'" in failure(driver.reconnect("other")).message


def test_abort_sends_cancel_and_nothing_more_is_told() -> None:
    driver = Driver()
    driver.connect()
    driver.open()
    assert driver.feed(Abort(1)) == [Send(Cancel(id=1))]
    assert driver.get(Ended(id=1)) == []
    assert driver.feed(Abort(1)) == []


def test_deadline_ends_the_request_here_and_there() -> None:
    driver = Driver()
    driver.connect()
    driver.open(timeout=3.0)
    assert driver.state.wake_at() == 1.0  # the ping
    effects = driver.feed(Tick(), after=3.0)
    assert Send(Cancel(id=1)) in effects
    assert failure(effects).code == "deadline_exceeded"


def test_no_gateway_is_told_with_its_reason_after_the_connect_timeout() -> None:
    driver = Driver(connect_timeout=2.0)
    driver.feed(LinkTrouble(1, "nobody listens there"))
    driver.open()
    assert driver.state.wake_at() == 2.0
    error = failure(driver.feed(Tick(), after=2.0))
    assert error.code == "connection_lost" and "nobody listens there" in error.message


def test_an_accepted_request_waits_longer_for_the_next_gateway() -> None:
    driver = Driver(connect_timeout=2.0, reconnect_timeout=30.0)
    driver.connect()
    driver.open(1)
    driver.get(accept(1))
    driver.open(2)
    driver.feed(LinkDown(1, "cut"))
    effects = driver.feed(Tick(), after=2.0)
    assert [e.key for e in effects if isinstance(e, Emit)] == [2]
    effects = driver.feed(Tick(), after=28.0)
    assert [e.key for e in effects if isinstance(e, Emit)] == [1]


def test_refusal_fails_all_calls_and_the_next_call_tries_again() -> None:
    driver = Driver()
    driver.open()
    driver.feed(LinkUp(1))
    effects = driver.get(Refused(error=WireError(code="unauthorized", message="no")))
    assert failure(effects).code == "unauthorized"
    assert driver.state.wake_at() == float("inf")
    driver.feed(Ask(2, "ready", 100.0))
    assert driver.feed(Tick()) == [Dial(2)]


def test_a_retryable_refusal_is_retried_after_its_time() -> None:
    driver = Driver()
    driver.open()
    driver.feed(LinkUp(1))
    error = WireError(code="overloaded", message="full", retryable=True, retry_after=4.0)
    assert driver.get(Refused(error=error)) == [HangUp()]
    assert driver.state.wake_at() == 4.0


def test_pings_each_second_and_dials_again_after_silence() -> None:
    driver = Driver()
    driver.connect()
    for _ in range(4):
        assert driver.feed(Tick(), after=1.0) == [Send(Ping())]
    assert driver.feed(Tick(), after=1.0) == [HangUp()]
    assert driver.feed(Tick(), after=0.05) == [Dial(2)]


def test_a_pong_without_session_dials_again() -> None:
    driver = Driver()
    driver.connect()
    assert driver.get(Pong(incarnation=1, session=1)) == []
    assert driver.get(Pong(incarnation=1, session=0)) == [HangUp()]


def test_backoff_doubles_to_its_bound() -> None:
    driver = Driver()
    waits = []
    for _ in range(8):
        driver.feed(LinkDown(driver.state.session, "cut"))
        waits.append(driver.state.wake_at() - driver.now)
        driver.feed(Tick(), after=2.0)
    assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])


def test_too_many_calls_are_refused_here() -> None:
    driver = Driver(max_open=2)
    driver.open(1)
    driver.feed(Ask(2, "ready", 100.0))
    assert failure(driver.open(3)).code == "overloaded"
    assert failure(driver.feed(Ask(4, "status", 100.0))).retryable


def test_a_request_too_large_for_a_frame_fails_alone() -> None:
    driver = Driver()
    driver.connect()
    driver.open(1)
    driver.open(2)
    assert failure(driver.feed(Oversized(1, 9_000_000))).code == "too_large"
    assert list(driver.state.requests) == [2]


def test_leaving_cancels_says_bye_and_refuses_later_calls() -> None:
    driver = Driver()
    driver.connect()
    driver.open(1)
    effects = driver.feed(Leave())
    assert sent(effects) == [Cancel(id=1), Bye()]
    assert failure(effects).code == "cancelled"
    assert failure(driver.open(2)).code == "cancelled"


def test_ready_is_told_at_once_or_with_the_welcome() -> None:
    driver = Driver()
    driver.feed(Ask(1, "ready", 100.0))
    assert driver.connect() == [Emit(1, Ready("m", 9))]
    assert driver.feed(Ask(2, "ready", 100.0)) == [Emit(2, Ready("m", 9))]


def test_a_question_is_given_up_when_its_time_is_up() -> None:
    driver = Driver()
    driver.connect()
    driver.feed(Ask(1, "status", 3.0))
    assert failure(driver.feed(Tick(), after=3.0)).code == "deadline_exceeded"
    assert not driver.state.asks
