"""Moves the messages of one plain zmq socket on an asyncio loop."""

import asyncio
from collections import deque
from collections.abc import Callable

import zmq
from msgspec import Struct

_BUDGET = 64
_NOBLOCK, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)
_RCVMORE = int(zmq.RCVMORE)
"""As plain numbers: arithmetic with pyzmq's enums costs more than the calls."""
_RETRY_FIRST, _RETRY_LAST = 0.001, 0.05


class LinkLimits(Struct, frozen=True, kw_only=True):
    """Bounds of one link.

    ``max_frame`` is in bytes. ``hwm`` counts messages in each libzmq queue, ``outbox`` and
    ``outbox_bytes`` bound what waits for one peer in this process on top of that.
    """

    max_frame: int = 8 << 20
    hwm: int = 1000
    outbox: int = 10_000
    outbox_bytes: int = 64 << 20


class Outbox:
    """Encoded messages that wait for one peer, in order and bounded."""

    def __init__(self, limits: LinkLimits) -> None:
        self._limits = limits
        self._waiting: deque[bytes] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, payload: bytes) -> bool:
        """Append; False when either bound would be passed."""
        size = self._bytes + len(payload)
        if len(self._waiting) >= self._limits.outbox or size > self._limits.outbox_bytes:
            return False
        self._waiting.append(payload)
        self._bytes = size
        return True

    def flush(self, write: Callable[[bytes], bool]) -> bool:
        """Hand messages to ``write`` until it says False; True when none is left."""
        while self._waiting:
            if not write(self._waiting[0]):
                return False
            self._bytes -= len(self._waiting.popleft())
        return True


class SocketPump:
    """Reads a socket for life and keeps offering its owner the chance to write.

    ``on_frames`` gets every message and may close the socket. ``flush`` writes what waits and
    returns whether all of it went out. At most a budget of messages is handled before other
    tasks get their turn. An exception of ``on_frames`` goes to the loop's exception handler;
    later messages still flow.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_frames: Callable[[list[bytes]], None],
        flush: Callable[[], bool],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        self._on_frames = on_frames
        self._flush = flush
        self._scheduled: asyncio.Handle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._pause = _RETRY_FIRST
        self._loop.add_reader(self._fd, self._wake)
        self._schedule()

    def touch(self) -> None:
        """Must follow every send: the descriptor is edge triggered and sending may eat an edge."""
        if self._scheduled is None and int(self._socket.get(_EVENTS)) & _POLLIN:
            self._schedule()

    def retry_soon(self) -> None:
        """Something waits to be written. A full ROUTER peer signals nothing, hence a timer."""
        if self._retry is None:
            self._retry = self._loop.call_later(self._pause, self._write)
            self._pause = min(self._pause * 2, _RETRY_LAST)

    def close(self) -> None:
        """Stop; nothing is called afterwards. The socket stays open."""
        self._loop.remove_reader(self._fd)
        for handle in (self._scheduled, self._retry):
            if handle is not None:
                handle.cancel()

    def _schedule(self) -> None:
        if self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        for _ in range(_BUDGET):
            if not int(self._socket.get(_EVENTS)) & _POLLIN:
                break
            frames = _receive(self._socket)
            if frames is None:
                break
            handled = False
            try:
                self._on_frames(frames)
                handled = True
            finally:
                if not handled and not self._socket.closed:
                    self._schedule()
            if self._socket.closed:
                return
        else:
            self._schedule()
        if self._retry is not None:
            self._write()

    def _write(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._flush():
            self._pause = _RETRY_FIRST
        else:
            self.retry_soon()
        self.touch()


def _receive(socket: "zmq.Socket[bytes]") -> list[bytes] | None:
    try:
        frames = [socket.recv(_NOBLOCK)]
    except zmq.Again:
        return None
    while socket.get(_RCVMORE):
        frames.append(socket.recv(_NOBLOCK))
    return frames
