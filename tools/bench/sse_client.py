"""A small streaming HTTP client that costs little CPU beside the server it measures.

One connection per instance, kept alive; each event is stamped when its last byte arrived,
however the network cut the stream into pieces. OpenAI streams have one ``data:`` line each.
"""

import asyncio
import ssl
import time
import urllib.parse
from collections.abc import Callable
from typing import cast

import httptools
from msgspec import Struct

_MAX_EVENT = 8 << 20

OnEvent = Callable[[bytes, float], None]
"""Called with the data of one event and its ``time.monotonic()``."""


class Target(Struct, frozen=True, kw_only=True):
    """Where requests go."""

    host: str
    port: int
    tls: bool
    prefix: str
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> "Target":
        """Read ``http(s)://host:port/prefix``. Raises ``ValueError``."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http URL")
        tls = parts.scheme == "https"
        return cls(
            host=parts.hostname,
            port=parts.port or (443 if tls else 80),
            tls=tls,
            prefix=parts.path.rstrip("/"),
            api_key=api_key,
        )


class Reply(Struct, frozen=True, kw_only=True):
    """How a request ended. ``body`` is set where the answer was not an event stream."""

    status: int
    body: bytes


class BrokenStream(Exception):
    """The connection ended before the answer did, or is not HTTP."""


class SseClient:
    """One keep-alive connection; one request at a time."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._stream: _Stream | None = None

    async def post(self, path: str, body: bytes, on_event: OnEvent, *, timeout: float) -> Reply:
        """Send ``body`` as JSON and report each event of the answer as it arrives.

        Raises:
            TimeoutError: no complete answer within ``timeout`` seconds.
            OSError, BrokenStream: no connection, or it broke.
        """
        async with asyncio.timeout(timeout):
            stream = await self._connected()
            ended = stream.begin(on_event)
            stream.write(_head(self._target, path, len(body)) + body)
            try:
                return await ended
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Drop the connection; the server sees the client leave."""
        if self._stream is not None:
            self._stream.abort()
            self._stream = None

    async def _connected(self) -> "_Stream":
        if self._stream is None or self._stream.closed:
            target = self._target
            context = ssl.create_default_context() if target.tls else None
            loop = asyncio.get_running_loop()
            _, self._stream = await loop.create_connection(
                _Stream, target.host, target.port, ssl=context
            )
        return self._stream


class _Stream(asyncio.Protocol):
    """Bytes of one connection to events; httptools calls the ``on_*`` methods."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._buffer = bytearray()
        self._on_event: OnEvent | None = None
        self._ended: asyncio.Future[Reply] | None = None
        self._streaming = False
        self._arrived = 0.0
        self.closed = False

    def begin(self, on_event: OnEvent) -> "asyncio.Future[Reply]":
        self._parser = httptools.HttpResponseParser(self)
        self._buffer.clear()
        self._on_event = on_event
        self._streaming = False
        self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def abort(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._arrived = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BrokenStream(f"not HTTP: {error}"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._fail(BrokenStream(f"the connection ended early: {exc or 'closed by the server'}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._streaming = value.startswith(b"text/event-stream")

    def on_body(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) > _MAX_EVENT:
            self._fail(BrokenStream("an event is too large"))
            self.abort()
        elif self._streaming:
            self._cut_events()

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.closed = True
        if self._ended is not None and not self._ended.done():
            status = self._parser.get_status_code()
            self._ended.set_result(Reply(status=status, body=bytes(self._buffer)))

    def _cut_events(self) -> None:
        assert self._on_event is not None
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            if line.startswith(b"data: "):
                self._on_event(line[6:].rstrip(b"\r"), self._arrived)

    def _fail(self, error: Exception) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)


def _head(target: Target, path: str, length: int) -> bytes:
    lines = [
        f"POST {target.prefix}{path} HTTP/1.1",
        f"Host: {target.host}:{target.port}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        f"Content-Length: {length}",
    ]
    if target.api_key is not None:
        lines.append(f"Authorization: Bearer {target.api_key}")
    return "\r\n".join([*lines, "", ""]).encode()
