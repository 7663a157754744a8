"""A gateway on a real socket that does what the test says, step by step."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self, TypeVar

import msgspec
import zmq

from diptych import DiptychError
from diptych.wire import (
    Accepted,
    ClientHello,
    Delta,
    DeltaItem,
    Ended,
    FromClient,
    Ping,
    Pong,
    Submit,
    ToClient,
    Usage,
    Welcome,
)

M = TypeVar("M")
T = TypeVar("T")
WAIT = 30.0


class ScriptedGateway:
    """Answers hello and ping by itself while it waits for something; the test does the rest.

    It lives in the test's thread: it reads only within ``expect``, ``expect_hello`` and ``poll``.
    """

    def __init__(self, endpoint: str, *, incarnation: int = 1, server_secret: bytes = b"") -> None:
        self.incarnation = incarnation
        self.sessions: dict[bytes, int] = {}
        self.messages: list[tuple[bytes, FromClient]] = []
        self.greets = True
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 500
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if server_secret:
            self._socket.curve_server = True
            self._socket.curve_secretkey = server_secret
        self._socket.bind(endpoint)
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._decoder = msgspec.msgpack.Decoder(FromClient)

    def restart(self) -> "ScriptedGateway":
        """Die without a word and come back as a new incarnation."""
        self._socket.close(0)
        self._context.term()
        return ScriptedGateway(self.endpoint, incarnation=self.incarnation + 1)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._socket.closed:
            self.close()

    def send(self, peer: bytes, message: ToClient) -> None:
        self.send_raw(peer, msgspec.msgpack.encode(message))

    def send_raw(self, peer: bytes, *frames: bytes) -> None:
        self._socket.send_multipart([peer, *frames])

    def expect(self, kind: type[M]) -> tuple[bytes, M]:
        """Return the oldest message of a kind, and who sent it."""
        deadline = time.monotonic() + WAIT
        while True:
            for at, (peer, message) in enumerate(self.messages):
                if isinstance(message, kind):
                    del self.messages[at]
                    return peer, message
            assert time.monotonic() < deadline, f"no {kind.__name__}, only {self.messages}"
            self.poll()

    def poll(self, seconds: float = 0.05) -> None:
        """Take what has come, waiting a little for the first message."""
        wait = int(seconds * 1000)
        while self._socket.poll(wait):
            wait = 0
            peer, frame = self._socket.recv_multipart()
            message = self._decoder.decode(frame)
            if isinstance(message, Ping):
                session = self.sessions.get(peer, 0)
                self.send(peer, Pong(incarnation=self.incarnation, session=session))
            elif isinstance(message, ClientHello) and self.greets:
                self.welcome(peer, message)
            else:
                self.messages.append((peer, message))

    def welcome(self, peer: bytes, hello: ClientHello) -> None:
        self.sessions[peer] = hello.session
        welcome = Welcome(
            incarnation=self.incarnation, session=hello.session, model="tiny", max_model_len=64
        )
        self.send(peer, welcome)

    def expect_hello(self) -> None:
        """Wait until a client is welcomed."""
        deadline = time.monotonic() + WAIT
        while not self.sessions:
            assert time.monotonic() < deadline, "no client"
            self.poll()

    def accept(self) -> tuple[bytes, Submit]:
        """Wait for a request and accept it with seed 7 and prompt ids (5, 6)."""
        peer, submit = self.expect(Submit)
        ids = None if submit.token_ids is not None else (5, 6)
        self.send(peer, Accepted(id=submit.id, seed=7, prompt_tokens=2, prompt_ids=ids))
        return peer, submit

    def tokens(self, peer: bytes, id_: int, index: int, text: str) -> None:
        """Send one token per character of ``text``; the token is the character's code."""
        codes = tuple(map(ord, text))
        self.send(peer, Delta(items=(DeltaItem(id_, index, codes, index, text),)))

    def end(self, peer: bytes, id_: int, count: int, text: str = "") -> None:
        usage = Usage(prompt_tokens=2, completion_tokens=count)
        ended = Ended(
            id=id_, reason="stop", num_tokens=count, text_at=count, text=text, usage=usage
        )
        self.send(peer, ended)

    def answer(self, text: str) -> tuple[bytes, Submit]:
        """Serve one whole request."""
        peer, submit = self.accept()
        self.tokens(peer, submit.id, 0, text)
        self.end(peer, submit.id, len(text))
        return peer, submit


def ipc(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/gw"


def beside(call: Callable[[], T], script: Callable[[], object]) -> Future[T]:
    """Run a blocking call in a thread while the script runs here."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        script()
        future.exception(WAIT)
    return future


def raised(future: Future[T]) -> DiptychError:
    error = future.exception(WAIT)
    assert isinstance(error, DiptychError)
    return error
