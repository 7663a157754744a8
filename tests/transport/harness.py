"""What the transport tests share: a message, a mailbox that can be waited on, raw peers."""

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import zmq
from msgspec import Struct

from shared.transport.link import DealerLink, RouterLink

Item = TypeVar("Item")
Context = zmq.Context[zmq.Socket[bytes]]
Raw = zmq.Socket[bytes]
DEADLINE = 30.0


class Closeable(Protocol):
    def close(self) -> None: ...


class Note(Struct, tag="note", frozen=True):
    """The message of these tests."""

    number: int
    body: bytes = b""


class Bell(Struct, tag="bell", frozen=True):
    """A second arm, so that decoding meets a union."""


Message = Note | Bell
Router = RouterLink[Message, Message]
Dealer = DealerLink[Message, Message]


class Mailbox(Generic[Item]):
    """Collects; ``until`` waits for a number of items."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._arrived = asyncio.Event()

    def put(self, item: Item) -> None:
        """Usable as ``on_message`` of a ``DealerLink``."""
        self.items.append(item)
        self._arrived.set()

    async def until(self, count: int) -> list[Item]:
        """Wait until ``count`` items are there."""
        async with asyncio.timeout(DEADLINE):
            while len(self.items) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return self.items


class Requests(Mailbox[tuple[bytes, Message]]):
    """Collects what a ``RouterLink`` receives."""

    def put_from(self, peer: bytes, message: Message) -> None:
        """Usable as ``on_message`` of a ``RouterLink``."""
        self.put((peer, message))


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what no event announces."""
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@contextmanager
def opened(*closeables: Closeable) -> Iterator[None]:
    """Close links and raw sockets at the end."""
    try:
        yield
    finally:
        for each in closeables:
            each.close()


def short_directory() -> Path:
    """A directory whose socket paths stay below 107 bytes."""
    return Path(tempfile.mkdtemp(prefix=f"dt{os.getpid()}-"))


def raw_dealer(context: Context, endpoint: str, identity: bytes, hwm: int = 1000) -> Raw:
    """A peer that reads only when told to, and may send anything."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, hwm)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    socket.setsockopt(zmq.SNDTIMEO, int(1e3 * DEADLINE))
    socket.setsockopt(zmq.RCVTIMEO, int(1e3 * DEADLINE))
    socket.connect(endpoint)
    return socket


def raw_router(context: Context, endpoint: str, hwm: int = 1000) -> Raw:
    """The binding counterpart of ``raw_dealer``."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, hwm)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDTIMEO, int(1e3 * DEADLINE))
    socket.setsockopt(zmq.RCVTIMEO, int(1e3 * DEADLINE))
    socket.bind(endpoint)
    return socket
