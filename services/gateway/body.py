"""Reads a request body without ever holding more than the limit."""

import asyncio

from starlette.requests import Request

from shared.errors import InvalidRequest, TooLarge

BODY_TIMEOUT = 60.0
"""Seconds a client may take to send its body."""

DROP_LIMIT = 32 << 20
"""Bytes beyond the limit that are still received, and dropped, before the answer."""


class ClientGone(Exception):
    """The client left before its request was complete."""


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body, at most ``limit`` bytes of it.

    The rest of a larger one is dropped as it comes (within bounds), since most clients read
    no answer before they have sent everything.

    Raises:
        InvalidRequest: there is none, or it does not arrive within ``BODY_TIMEOUT``.
        TooLarge: by the announced length or by the bytes that came.
        ClientGone: the connection ended first.
    """
    text = request.headers.get("content-length", "0")
    announced = int(text[:20]) if text.isascii() and text.isdigit() else 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            if announced > limit + DROP_LIMIT or (announced > limit and _waits(request)):
                raise _too_large(limit)
            body = await _receive_all(request, limit)
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {BODY_TIMEOUT:g} s") from None
    if not body:
        raise InvalidRequest("the request has no body")
    return body


async def _receive_all(request: Request, limit: int) -> bytes:
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(part)
        if size > limit + DROP_LIMIT:
            break
        if size > limit:
            parts.clear()
        else:
            parts.append(part)
    if size > limit:
        raise _too_large(limit)
    return b"".join(parts)


def _waits(request: Request) -> bool:
    """The client asks before it sends the body."""
    return request.headers.get("expect", "").lower() == "100-continue"


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body is larger than {limit} bytes (gateway.max_body)")
