"""The blocking client against a scripted gateway on real sockets."""

import gc
import io
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from diptych import (
    Client,
    ConnectionLost,
    InvalidRequest,
    Overloaded,
    Timeout,
    Unauthorized,
)
from diptych.wire import (
    Cancel,
    ClientHello,
    Ended,
    Goodbye,
    Refused,
    StatusQuery,
    StatusReply,
    Submit,
    WireError,
)
from tests.transport.sdk_gateway import WAIT, ScriptedGateway, beside, ipc, raised


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ScriptedGateway]:
    with ScriptedGateway(ipc(tmp_path)) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: ScriptedGateway) -> Iterator[Client]:
    with Client(gateway.endpoint) as client:
        yield client


def test_generate_returns_the_whole_output(gateway: ScriptedGateway, client: Client) -> None:
    seen: list[Submit] = []
    future = beside(
        lambda: client.generate("hi", max_tokens=3, temperature=0.0),
        lambda: seen.append(gateway.answer("abc")[1]),
    )
    out = future.result()
    assert (out.text, out.token_ids, out.seed) == ("abc", (97, 98, 99), 7)
    assert (out.usage.prompt_tokens, out.usage.completion_tokens) == (2, 3)
    assert seen[0].prompt == "hi" and seen[0].params.max_tokens == 3


def test_chat_sends_messages(gateway: ScriptedGateway, client: Client) -> None:
    seen: list[Submit] = []
    chat = [{"role": "user", "content": "hi"}]
    future = beside(lambda: client.chat(chat), lambda: seen.append(gateway.answer("yes")[1]))
    assert future.result().text == "yes"
    assert seen[0].messages is not None and seen[0].messages[0].content == "hi"


def test_stream_gives_tokens_as_they_come_and_the_tail(
    gateway: ScriptedGateway, client: Client
) -> None:
    with client.stream("hi") as stream:
        peer, submit = gateway.accept()
        gateway.tokens(peer, submit.id, 0, "a")
        assert next(stream).text == "a"
        gateway.tokens(peer, submit.id, 1, "b")
        assert next(stream).token_ids == (98,)
        gateway.end(peer, submit.id, 2, text="!")
        assert [(c.index, c.token_ids, c.text) for c in stream] == [(2, (), "!")]
        assert stream.completion is not None and stream.completion.text == "ab!"
        assert list(stream) == []


def test_a_slow_consumer_loses_nothing_and_blocks_nobody(
    gateway: ScriptedGateway, client: Client
) -> None:
    stream = client.stream("slow")
    peer, submit = gateway.accept()
    for index in range(0, 60_000, 4):
        gateway.tokens(peer, submit.id, index, "abcd")
    gateway.end(peer, submit.id, 60_000)
    quick = client.submit("quick")
    gateway.answer("q")
    assert quick.result(WAIT).text == "q"
    assert "".join(chunk.text for chunk in stream) == "abcd" * 15_000


def test_a_killed_gateway_is_resumed_at_its_successor(
    gateway: ScriptedGateway, client: Client
) -> None:
    stream = client.stream("hi", max_tokens=4)
    peer, submit = gateway.accept()
    gateway.tokens(peer, submit.id, 0, "ab")
    assert next(stream).text == "ab"
    with gateway.restart() as successor:
        peer, rest = successor.accept()
        assert rest.received == (97, 98) and rest.params.seed == 7
        assert rest.token_ids == (5, 6) and rest.prompt is None
        successor.tokens(peer, rest.id, 1, "bc")
        successor.end(peer, rest.id, 3, text="!")
        assert [chunk.text for chunk in stream] == ["c", "!"]
        assert stream.completion is not None
        assert stream.completion.token_ids == (97, 98, 99) and stream.completion.resumes == 1


def test_goodbye_resumes_at_once(gateway: ScriptedGateway, client: Client) -> None:
    future = client.submit("hi")
    peer, _ = gateway.accept()
    gateway.send(peer, Goodbye())
    other, again = gateway.expect(Submit)
    assert other != peer and again.params.seed == 7
    gateway.messages.append((other, again))
    gateway.answer("ok")
    assert future.result(WAIT).text == "ok"


def test_a_forgotten_session_is_noticed_by_the_pong(
    gateway: ScriptedGateway, client: Client
) -> None:
    future = client.submit("hi")
    peer, _ = gateway.accept()
    del gateway.sessions[peer]
    gateway.answer("ok")
    assert future.result(WAIT).resumes == 1


@pytest.mark.parametrize(
    "frames",
    [
        (b"",),
        (b"\xc1",),
        (b"\x81\xa4type\xa3abc",),
        (b"\x81\xa4type\xa5ended",),
        (msgspec.msgpack.encode({"type": "delta", "items": [[1, "x"]]}),),
        (b"\x91" * 100_000,),
        (msgspec.msgpack.encode(Goodbye()), b"second frame"),
    ],
    ids=["empty", "never", "tag", "field", "item", "deep", "frames"],
)
def test_malformed_frames_start_a_new_session_and_lose_nothing(
    gateway: ScriptedGateway, client: Client, frames: tuple[bytes, ...]
) -> None:
    stream = client.stream("hi")
    peer, submit = gateway.accept()
    gateway.tokens(peer, submit.id, 0, "a")
    gateway.send_raw(peer, *frames)
    peer, submit = gateway.accept()
    assert submit.received == (97,)
    gateway.tokens(peer, submit.id, 1, "b")
    gateway.end(peer, submit.id, 2)
    assert "".join(chunk.text for chunk in stream) == "ab"


def test_closing_a_stream_cancels(gateway: ScriptedGateway, client: Client) -> None:
    stream = client.stream("hi")
    peer, submit = gateway.accept()
    gateway.tokens(peer, submit.id, 0, "a")
    next(stream)
    stream.close()
    assert gateway.expect(Cancel)[1].id == submit.id
    assert list(stream) == [] and stream.completion is None


def test_forgetting_a_stream_cancels(gateway: ScriptedGateway, client: Client) -> None:
    stream = client.stream("hi")
    _, submit = gateway.accept()
    del stream
    gc.collect()
    assert gateway.expect(Cancel)[1].id == submit.id


def test_cancelling_a_future_cancels(gateway: ScriptedGateway, client: Client) -> None:
    future = client.submit("hi")
    _, submit = gateway.accept()
    assert future.cancel()
    assert gateway.expect(Cancel)[1].id == submit.id
    with pytest.raises(CancelledError):
        future.result(WAIT)


@pytest.mark.parametrize("streaming", [False, True])
def test_keyboard_interrupt_cancels(
    gateway: ScriptedGateway, client: Client, streaming: bool
) -> None:
    def interrupt() -> None:
        gateway.accept()
        os.kill(os.getpid(), signal.SIGINT)

    # A test run started in the background inherits an ignored SIGINT.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ThreadPoolExecutor(1) as pool:
            script = pool.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                list(client.stream("hi")) if streaming else client.generate("hi")
            script.result(WAIT)
    finally:
        signal.signal(signal.SIGINT, inherited)
    gateway.expect(Cancel)


def test_the_gateways_error_is_raised_with_its_type(
    gateway: ScriptedGateway, client: Client
) -> None:
    def fail() -> None:
        peer, submit = gateway.expect(Submit)
        error = WireError(code="invalid_request", message="top_p must be > 0", param="top_p")
        gateway.send(peer, Ended(id=submit.id, error=error))

    error = raised(beside(lambda: client.generate("hi", top_p=0.0), fail))
    assert isinstance(error, InvalidRequest) and error.param == "top_p"


def overload(gateway: ScriptedGateway, after: float = 0.05) -> None:
    peer, submit = gateway.expect(Submit)
    error = WireError(code="overloaded", message="full", retryable=True, retry_after=after)
    gateway.send(peer, Ended(id=submit.id, error=error))


def test_a_single_call_raises_overloaded(gateway: ScriptedGateway, client: Client) -> None:
    error = raised(beside(lambda: client.generate("hi"), lambda: overload(gateway)))
    assert isinstance(error, Overloaded) and error.retry_after == 0.05


def test_timeout_raises_and_cancels(gateway: ScriptedGateway, client: Client) -> None:
    future = beside(lambda: client.generate("hi", timeout=0.3), lambda: gateway.expect(Cancel))
    assert isinstance(raised(future), Timeout)


def test_no_gateway_raises_connection_lost(tmp_path: Path) -> None:
    with Client(ipc(tmp_path), connect_timeout=0.2) as client:
        with pytest.raises(ConnectionLost, match="nobody listens there"):
            client.generate("hi")
        with pytest.raises(ConnectionLost):
            client.wait_ready()
        with pytest.raises(ConnectionLost):
            list(client.stream("hi"))


def test_a_client_may_start_before_its_gateway(tmp_path: Path) -> None:
    with Client(ipc(tmp_path)) as client:
        future = client.submit("hi")
        with ScriptedGateway(ipc(tmp_path)) as gateway:
            gateway.answer("ok")
            assert future.result(WAIT).text == "ok"


def test_a_refused_key_is_named(gateway: ScriptedGateway) -> None:
    gateway.greets = False
    with Client(gateway.endpoint, api_key="wrong") as client:

        def refuse() -> None:
            peer, hello = gateway.expect(ClientHello)
            assert hello.api_key == "wrong"
            error = WireError(code="unauthorized", message="unknown API key")
            gateway.send(peer, Refused(error=error))

        assert isinstance(raised(beside(client.wait_ready, refuse)), Unauthorized)


def test_wait_ready_and_status(gateway: ScriptedGateway, client: Client) -> None:
    ready = beside(client.wait_ready, gateway.expect_hello).result()
    assert (ready.model, ready.max_model_len) == ("tiny", 64)

    def reply() -> None:
        peer, query = gateway.expect(StatusQuery)
        fleet = msgspec.msgpack.encode({"queued": 3})
        gateway.send(peer, StatusReply(query=query.query, fleet=fleet))

    assert beside(client.status, reply).result() == {"queued": 3}


def test_batch_keeps_order_and_window_and_retries_overloaded(
    gateway: ScriptedGateway, client: Client
) -> None:
    most_open = 0

    def script() -> None:
        nonlocal most_open
        overload(gateway)
        for _ in range(8):
            gateway.poll()
            most_open = max(most_open, sum(isinstance(m, Submit) for _, m in gateway.messages))
            peer, submit = gateway.accept()
            assert submit.prompt is not None
            gateway.tokens(peer, submit.id, 0, submit.prompt)
            gateway.end(peer, submit.id, len(submit.prompt))

    prompts = [f"p{i}" for i in range(8)]
    future = beside(lambda: client.generate_batch(prompts, max_in_flight=3), script)
    assert [c.text for c in future.result()] == prompts
    assert most_open <= 3


def test_batch_raises_the_first_error_and_cancels_the_rest(
    gateway: ScriptedGateway, client: Client
) -> None:
    def script() -> None:
        peer, submit = gateway.expect(Submit)
        error = WireError(code="invalid_request", message="empty prompt", param="prompt")
        gateway.send(peer, Ended(id=submit.id, error=error))
        gateway.expect(Cancel)

    future = beside(lambda: client.generate_batch(["", "b"], max_in_flight=2), script)
    assert isinstance(raised(future), InvalidRequest)


def test_batch_draws_its_progress_on_a_terminal(
    gateway: ScriptedGateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    beside(lambda: client.generate_batch(["a"]), lambda: gateway.answer("xyz")).result()
    assert "1/1  3 tok" in terminal.getvalue() and terminal.getvalue().endswith("\n")
