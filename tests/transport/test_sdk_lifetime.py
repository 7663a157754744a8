"""Clients side by side, and what is left of a client that ended, on real sockets."""

import gc
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from diptych import (
    Cancelled,
    Client,
    Completion,
    ConnectionLost,
    Curve,
)
from diptych.wire import (
    Bye,
    Cancel,
    Goodbye,
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


def test_two_clients_in_one_process_do_not_mix(gateway: ScriptedGateway) -> None:
    with Client(gateway.endpoint) as one, Client(gateway.endpoint) as two:
        futures = [one.submit("one"), two.submit("two")]
        for _ in futures:
            peer, submit = gateway.accept()
            assert submit.prompt is not None
            gateway.tokens(peer, submit.id, 0, submit.prompt)
            gateway.end(peer, submit.id, 3)
        assert [f.result(WAIT).text for f in futures] == ["one", "two"]


def test_many_threads_share_one_client(gateway: ScriptedGateway, client: Client) -> None:
    def script() -> None:
        for _ in range(64):
            peer, submit = gateway.accept()
            assert submit.prompt is not None
            gateway.tokens(peer, submit.id, 0, submit.prompt)
            gateway.end(peer, submit.id, len(submit.prompt))

    def calls() -> list[Completion]:
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(client.generate, map(str, range(64))))

    assert [c.text for c in beside(calls, script).result()] == [str(i) for i in range(64)]


def test_close_cancels_says_bye_and_ends_everything(gateway: ScriptedGateway) -> None:
    client = Client(gateway.endpoint)
    future = client.submit("hi")
    _, submit = gateway.accept()
    client.close()
    client.close()
    assert gateway.expect(Cancel)[1].id == submit.id
    gateway.expect(Bye)
    assert isinstance(raised(future), Cancelled)
    with pytest.raises(Cancelled):
        client.generate("hi")
    assert all(t.name != "diptych-client" for t in threading.enumerate())


def test_a_forgotten_client_ends_its_thread(gateway: ScriptedGateway) -> None:
    """The leak check of conftest sees thread and descriptors, too."""
    client = Client(gateway.endpoint)
    future = client.submit("hi")
    gateway.accept()
    del client
    gc.collect()
    gateway.expect(Bye)
    assert isinstance(raised(future), Cancelled)


def test_a_stream_keeps_its_client(gateway: ScriptedGateway) -> None:
    stream = Client(gateway.endpoint).stream("hi")
    gc.collect()
    gateway.answer("ok")
    assert "".join(chunk.text for chunk in stream) == "ok"


def test_descriptors_do_not_grow_with_reconnects(gateway: ScriptedGateway, client: Client) -> None:
    sizes = []
    for _ in range(20):
        future = client.submit("hi")
        peer, _ = gateway.accept()
        gateway.send(peer, Goodbye())
        gateway.answer("ok")
        future.result(WAIT)
        sizes.append(len(os.listdir("/proc/self/fd")))
    assert max(sizes[10:]) <= max(sizes[:10]) + 2


def test_a_dead_io_thread_fails_its_calls(
    gateway: ScriptedGateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in the I/O thread must not leave callers waiting for their deadline."""
    crashes: list[object] = []
    monkeypatch.setattr(threading, "excepthook", crashes.append)
    future = client.submit("hi")
    gateway.accept()
    monkeypatch.setattr(client._channel, "_take_frames", lambda: 1 / 0)
    error = raised(future)
    assert error.code == "internal" and len(crashes) == 1


def test_curve_keys_encrypt_and_a_wrong_server_key_fails() -> None:
    public, secret = zmq.curve_keypair()
    mine = zmq.curve_keypair()
    with ScriptedGateway("tcp://127.0.0.1:*", server_secret=secret) as gateway:
        with Client(gateway.endpoint, curve=Curve(public, *mine)) as client:
            future = client.submit("hi")
            gateway.answer("ok")
            assert future.result(WAIT).text == "ok"
        wrong = Curve(mine[0], *mine)
        with (
            Client(gateway.endpoint, curve=wrong, connect_timeout=0.5) as client,
            pytest.raises(ConnectionLost),
        ):
            client.generate("hi")
