"""One HTTP connection, with the bounds that uvicorn's own lacks.

Uvicorn waits for ever for a request that never comes whole and keeps a head of any size. So a
few thousand silent sockets would lock everybody out, and one endless header fill the memory.
"""

import asyncio
import socket
import weakref
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_TIMEOUT = 15.0
"""Seconds a connection has for its first request's head, and each later head from its start."""
MAX_HEAD = 64 << 10
"""Bytes of request line and headers, give or take one read from the socket."""

PROBE_FIRST, PROBE_LAST = 0.25, 4.0
"""Seconds between two probes of a client that sends no more, doubled from first to last."""
PROBE_TIMEOUT = 20.0
"""Seconds after which such a client whose machine acknowledges nothing has left."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b"3\r\n:\n\n\r\n"
"""A chunk that event streams ignore; nothing else here is chunked."""

CHUNKS = "diptych.chunks"
"""The key of a ``ChunkWriter`` among the extensions of an ASGI scope."""


class ChunkWriter:
    """Writes parts of a chunked body past the ASGI ``send``, which is a coroutine for each."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # the cycle owns the scope, and so this

    def writable(self) -> bool:
        """Whether the body is chunked and under way, and the client keeps up."""
        cycle = self._cycle()
        if cycle is None or cycle.disconnected or cycle.response_complete:
            return False
        return bool(cycle.chunked_encoding) and not cycle.flow.write_paused

    def write(self, body: bytes) -> None:
        """Write one part that is not empty; only while ``writable``."""
        cycle = self._cycle()
        if cycle is not None:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose request head is slow or large; the body has its own limits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._running: list[RequestResponseCycle] = []
        self._probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        for cycle in self._running:  # uvicorn tells the last of pipelined requests only
            cycle.disconnected = True
            cycle.message_event.set()
        self._running.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is None:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(f"The request head is larger than {MAX_HEAD} bytes.")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Stay open for a client that may still read, and find out whether it does.

        One that left and one that closed its sending side only look the same until something is
        written: the former's kernel then breaks the connection, or its machine is gone as well and
        acknowledges nothing. HTTP/1.0 has nothing to write ahead of an answer, so there both have
        left.
        """
        open_cycles = self._unanswered()
        old = any(cycle.scope["http_version"] == "1.0" for cycle in open_cycles)
        if not open_cycles or old or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        peer: socket.socket = self.transport.get_extra_info("socket")
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(PROBE_TIMEOUT * 1000))
        self._probe(PROBE_FIRST)
        return True

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_arrived()
        super().on_headers_complete()
        self._unanswered().append(self.cycle)
        extensions: dict[str, Any] = {CHUNKS: ChunkWriter(self.cycle)}
        self.cycle.scope["extensions"] = extensions

    def _unanswered(self) -> list[RequestResponseCycle]:
        """Forget the requests that have their answer; return the others, as kept here."""
        self._running = [c for c in self._running if not c.response_complete]
        return self._running

    def _probe(self, pause: float) -> None:
        open_cycles = self._unanswered()
        if not open_cycles or self.transport.is_closing():
            return
        cycle = open_cycles[0]
        if not cycle.response_started:
            self.transport.write(_CONTINUE)
        elif cycle.chunked_encoding and not self.flow.write_paused:
            self.transport.write(_COMMENT)
        following = min(2 * pause, PROBE_LAST)
        self._probe_timer = self.loop.call_later(pause, self._probe, following)

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self._head_late)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        if self._unanswered():
            # half a pipelined request behind one that is still being answered
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self._head_late)
        elif not self.transport.is_closing():
            self.transport.close()
