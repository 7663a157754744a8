"""What a call makes of its arguments, and a batch of its answers."""

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from diptych import (
    Completion,
    Curve,
    InvalidRequest,
    Message,
    Overloaded,
    ResponseFormat,
    ServerError,
    TooLarge,
    Unauthorized,
    Usage,
    default_endpoint,
)
from diptych import wire as wire_module
from diptych.batch import BatchPlan, ProgressBar
from diptych.endpoint import check_endpoint
from diptych.errors import error_from
from diptych.params import chat_submit, check_timeout, prompt_submit
from diptych.wire import SamplingParams, Submit, WireError
from shared.config import Deployment, WorkerSection, WorkersSection
from shared.errors import ErrorPayload
from shared.errors import Overloaded as ServerOverloaded
from shared.messages import request as server
from shared.runtime import client_endpoint


def test_prompt_text_and_token_ids() -> None:
    assert prompt_submit("p", {"max_tokens": 3, "stop": "x"}, True) == Submit(
        id=0, prompt="p", params=SamplingParams(max_tokens=3, stop=("x",)), timeline=True
    )
    assert prompt_submit(range(3), {}, False).token_ids == (0, 1, 2)


def test_chat_takes_a_string_structs_or_mappings() -> None:
    user = Message(role="user", content="hi")
    for messages in ("hi", [user], [{"role": "user", "content": "hi"}]):
        assert chat_submit(messages, {}, False).messages == (user,)


def test_response_formats() -> None:
    schema = prompt_submit("p", {"response_format": {"type": "object"}}, False)
    form = schema.params.response_format
    assert form == ResponseFormat(kind="json_schema", schema='{"type":"object"}')
    plain = prompt_submit("p", {"response_format": "json_object"}, False)
    assert plain.params.response_format == ResponseFormat(kind="json_object")
    assert prompt_submit("p", {"response_format": form}, False).params.response_format == form


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temprature": 1.0}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop": ["a", 1]}, "stop"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"response_format": 3}, "response_format"),
    ],
)
def test_a_wrong_parameter_is_named(params: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prompt_submit("p", params, False)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "prompt", ["\ud800", [2**70], ["a"], "x" * (9 << 20)], ids=["surrogate", "int", "str", "big"]
)
def test_what_cannot_be_encoded_is_refused_before_the_io_thread_sees_it(prompt: Any) -> None:
    with pytest.raises((InvalidRequest, TooLarge)):
        prompt_submit(prompt, {}, False)


@pytest.mark.parametrize("messages", [[{"role": "x", "content": ""}], [{"role": "user"}]])
def test_wrong_messages_are_named(messages: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_submit(messages, {}, False)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf")])
def test_timeouts_must_be_positive_and_finite(timeout: float) -> None:
    with pytest.raises(InvalidRequest):
        check_timeout(timeout)


def test_default_endpoint_is_where_the_local_gateway_binds() -> None:
    workers = WorkersSection(mixed=WorkerSection())
    local = Deployment(name="local", deployment_type="colocated", workers=workers)
    assert default_endpoint() == client_endpoint(local)


@pytest.mark.parametrize(
    "endpoint", ["http://x", "tcp://localhost", "tcp://h:99999", "ipc://", "ipc:///" + "x" * 120]
)
def test_endpoints_that_cannot_work_are_refused(endpoint: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_endpoint(endpoint, None)
    assert caught.value.param == "endpoint"


def test_another_machine_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_endpoint("tcp://10.0.0.1:5", None)
    assert caught.value.param == "curve"
    for endpoint in ("tcp://127.0.0.1:5", "tcp://localhost:5", "tcp://[::1]:5"):
        check_endpoint(endpoint, None)
    public, secret = zmq.curve_keypair()
    (tmp_path / "gw").write_bytes(public + b"\n")
    (tmp_path / "me").write_bytes(secret)
    curve = Curve.load(tmp_path / "gw", tmp_path / "me")
    assert curve == Curve(public, public, secret)
    check_endpoint("tcp://10.0.0.1:5", curve)
    (tmp_path / "me").write_bytes(b"short")
    for wrong in ("me", "absent"):
        with pytest.raises(InvalidRequest):
            Curve.load(tmp_path / "gw", tmp_path / wrong)


def test_errors_keep_code_and_retry_and_unknown_codes_stay_readable() -> None:
    busy = error_from(WireError(code="overloaded", message="m", retryable=True, retry_after=2.0))
    assert isinstance(busy, Overloaded) and busy.retry_after == 2.0 and busy.retryable
    assert isinstance(error_from(WireError(code="unauthorized", message="m")), Unauthorized)
    odd = error_from(WireError(code="worker_lost", message="m", retryable=True))
    assert isinstance(odd, ServerError) and odd.code == "worker_lost" and odd.retryable
    assert not ServerError.retryable


def test_wire_structs_mirror_the_servers() -> None:
    """The gateway converts by field name; a field added there must be added here."""
    payload = ServerOverloaded("m", retry_after=1.0).payload()
    assert isinstance(payload, ErrorPayload)
    converted = msgspec.convert(payload, WireError, from_attributes=True)
    assert converted == WireError(code="overloaded", message="m", retryable=True, retry_after=1.0)
    assert set(ErrorPayload.__struct_fields__) == set(WireError.__struct_fields__)
    assert server.PhaseTimes.__struct_fields__ == wire_module.PhaseTimes.__struct_fields__
    sampling = set(server.Sampling.__struct_fields__) - {"grammar"}
    assert sampling <= set(SamplingParams.__struct_fields__)


def done(tokens: int = 1) -> Completion:
    usage = Usage(completion_tokens=tokens)
    return Completion(text="", token_ids=(), finish_reason="stop", usage=usage, seed=1)


def test_batch_keeps_its_window_and_retries_overloaded_after_its_time() -> None:
    plan = BatchPlan(3, 2, 10.0, keep_errors=False)
    assert plan.start(0.0) == (0, 10.0)
    assert plan.start(0.0) == (1, 10.0)
    assert plan.start(0.0) is None
    plan.end(0, Overloaded("busy", retry_after=2.0), 1.0)
    assert plan.start(1.0) == (2, 10.0)
    plan.end(1, done(), 1.5)
    assert plan.start(2.0) is None and plan.wake_in(2.0) == 1.0
    assert plan.start(3.0) == (0, 7.0)
    plan.end(0, done(), 4.0)
    plan.end(2, done(), 4.0)
    assert plan.done and plan.results() == [done()] * 3


def test_batch_gives_up_on_overloaded_at_the_prompts_deadline() -> None:
    plan = BatchPlan(1, 1, 10.0, keep_errors=False)
    plan.start(0.0)
    with pytest.raises(Overloaded):
        plan.end(0, Overloaded("busy", retry_after=10.0), 0.0)


def test_batch_keeps_errors_in_place_if_asked() -> None:
    plan = BatchPlan(2, 2, 10.0, keep_errors=True)
    plan.start(0.0)
    plan.start(0.0)
    error = Unauthorized("no")
    plan.end(1, error, 0.0)
    plan.end(0, done(), 0.0)
    assert plan.results() == [done(), error]


def test_batch_needs_a_window() -> None:
    with pytest.raises(InvalidRequest):
        BatchPlan(1, 0, 1.0, keep_errors=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_on_a_terminal_only() -> None:
    plan = BatchPlan(2, 2, 10.0, keep_errors=True)
    plan.start(0.0)
    plan.end(0, done(5), 0.0)
    terminal, file = Terminal(), io.StringIO()
    ProgressBar(2, terminal, True).draw(plan, last=True)
    ProgressBar(2, file, True).draw(plan, last=True)
    ProgressBar(2, terminal, False).draw(plan, last=True)
    assert terminal.getvalue().count("\r") == 1 and "1/2  5 tok" in terminal.getvalue()
    assert file.getvalue() == ""
