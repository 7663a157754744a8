"""A stranger at a peer's address: libzmq ends the socket's session for good, the link must not."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shared.transport import hopeless
from shared.transport.bulk.fetches import FetchLimits
from shared.transport.bulk.reader import Fetched
from tests.transport.harness import (
    Context,
    Dealer,
    Message,
    Note,
    Requests,
    Router,
    eventually,
    opened,
)
from tests.transport.test_bulk_link import Ends

Run = Callable[..., Any]
NO_ZMTP = bytes(100)
"""Bytes after which libzmq does not connect again."""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopeless, "HOPELESS", 0.5)


@contextmanager
def stranger(port: int = 0) -> Iterator[tuple[str, threading.Event]]:
    """Listen where a peer is expected; the event says that somebody was answered."""
    answered = threading.Event()
    listener = socket.create_server(("127.0.0.1", port), reuse_port=False)

    def answer() -> None:
        while True:
            try:
                caller, _ = listener.accept()
            except OSError:
                return
            with caller:
                caller.sendall(NO_ZMTP)
            answered.set()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", answered
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_a_control_link_survives_a_stranger_at_the_address(run: Run, context: Context) -> None:
    async def main() -> None:
        with stranger() as (endpoint, answered):
            dealer = Dealer(context, endpoint, b"w#1", Message, lambda _: None)
            assert await asyncio.to_thread(answered.wait, 10)
        inbox = Requests()
        with opened(dealer, Router(context, endpoint, Message, inbox.put_from)):

            def heard() -> bool:  # what the stranger still seemed to take is lost
                return dealer.send(Note(1)) and bool(inbox.items)

            await eventually(heard)
            assert inbox.items[0] == (b"w#1", Note(1))

    run(main())


def test_a_fetch_survives_a_stranger_at_the_address(context: Context) -> None:
    ends = Ends(context, FetchLimits(slots=4, stall=1.0, attempts=10))
    try:
        endpoint = ends.serve_lastingly()
        assert ends.open(endpoint).error is None
        assert ends.server is not None
        ends.server.close()
        port = int(endpoint.rpartition(":")[2])
        deadline = time.monotonic() + 10
        while True:
            try:
                with stranger(port) as (_, answered):
                    assert answered.wait(10)
                break
            except OSError:
                assert time.monotonic() < deadline  # libzmq lets go a moment later
                time.sleep(0.01)
        ends.serve_again(endpoint)
        ends.start()
        assert isinstance(ends.outcomes.get(timeout=20), Fetched)
    finally:
        ends.close()
