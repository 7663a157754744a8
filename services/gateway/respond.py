"""Turns a running call into an HTTP answer: one JSON document or an event stream."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.body import ClientGone
from services.gateway.call import Call
from services.gateway.choice import Choice
from services.gateway.errors import RequestFailed, error_body, http_error
from services.gateway.http_protocol import CHUNKS, ChunkWriter

FIRST_WAIT = 10.0
"""Seconds an event stream waits for its first output, to answer a refusal by status code."""
GRACE = 30.0
"""Seconds past a call's deadline after which a client that does not read is cut off."""
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"


class Renderer(Protocol):
    """Writes one kind of answer."""

    def chunk(self, choice: Choice) -> bytes:
        """Take what is new of a choice as server-sent events; may be empty."""
        ...

    def closing(self) -> bytes:
        """Return the events that follow the last choice's end."""
        ...

    def whole(self) -> bytes:
        """Return the JSON document of a call that ended well."""
        ...


async def answer_whole(call: Call, renderer: Renderer, request: Request) -> Response:
    """Wait for the end of the call; cancels it when the client leaves.

    Raises:
        RequestFailed: an output failed.
        ClientGone: nobody is left to answer.
    """
    async with _watched(call, request.receive):
        await call.whole()
        if call.error is not None:
            raise RequestFailed(call.error)
        if call.cancelled:
            raise ClientGone
        return Response(renderer.whole(), media_type="application/json")


class EventStream(Response):
    """A streamed answer: ``data: {chunk}`` events, then ``data: [DONE]``.

    Until the first output (at most ``FIRST_WAIT`` seconds) nothing is sent, so that a refused
    request gets its own status code; afterwards an error is an event. Leaving cancels the call.
    """

    def __init__(self, call: Call, renderer: Renderer) -> None:
        super().__init__(media_type="text/event-stream")
        self._call = call
        self._renderer = renderer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._call
        left = call.plan.ttl + GRACE
        try:
            async with _watched(call, receive), asyncio.timeout(left):
                changed = await self._first()
                if call.error is not None:
                    error = http_error(RequestFailed(call.error))
                    early = Response(
                        error.body, error.status, error.headers, media_type="application/json"
                    )
                    await early(scope, receive, send)
                    return
                await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
                await self._stream(changed, send, scope.get("extensions", {}).get(CHUNKS))
        except TimeoutError:
            # Returning without a complete body makes the server close the connection.
            return

    async def _first(self) -> Sequence[Choice]:
        """Wait for the first output, but only so long; nothing is lost by giving up."""
        try:
            async with asyncio.timeout(FIRST_WAIT):
                return await self._call.changed()
        except TimeoutError:
            return ()

    async def _stream(
        self, changed: Sequence[Choice], send: Send, writer: ChunkWriter | None
    ) -> None:
        call, renderer = self._call, self._renderer
        at_once = None if writer is None else partial(self._write, writer)
        while not call.cancelled:
            parts = [renderer.chunk(choice) for choice in changed]
            more = True
            if call.error is not None:
                parts += [b"data: ", error_body(RequestFailed(call.error)), b"\n\n", _DONE]
                more = False
            elif call.ended:
                parts += [renderer.closing(), _DONE]
                more = False
            body = b"".join(parts)
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": more})
            if not more:
                return
            changed = await call.changed(at_once)

    def _write(self, writer: ChunkWriter, changed: Sequence[Choice]) -> bool:
        """Send what is no end; False while the client reads too slowly."""
        if not writer.writable():
            return False
        chunk = self._renderer.chunk
        body = b"".join(map(chunk, changed)) if len(changed) > 1 else chunk(changed[0])
        if body:
            writer.write(body)
        return True


@asynccontextmanager
async def _watched(call: Call, receive: Receive) -> AsyncIterator[None]:
    """Cancel the call as soon as the client disconnects, and in any case at the end."""
    watcher = asyncio.create_task(_watch(call, receive))
    try:
        yield
    finally:
        watcher.cancel()
        call.cancel()


async def _watch(call: Call, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    call.cancel()
