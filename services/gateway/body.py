"""Reads a request body without ever holding more than the limit."""

import asyncio

from starlette.requests import Request

from shared.errors import InvalidRequest, TooLarge

BODY_TIMEOUT = 60.0
"""Seconds a client may take to send its body."""


class ClientGone(Exception):
    """The client left before its request was complete."""


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body, at most ``limit`` bytes of it.

    Raises:
        InvalidRequest: there is none, or it does not arrive within ``BODY_TIMEOUT``.
        TooLarge: by the announced length, before anything is read, or by the bytes that came.
        ClientGone: the connection ended first.
    """
    announced = request.headers.get("content-length", "0")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            body = await _receive_all(request, limit)
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {BODY_TIMEOUT:g} s") from None
    if not body:
        raise InvalidRequest("the request has no body")
    return body


async def _receive_all(request: Request, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body is larger than {limit} bytes (gateway.max_body)")
