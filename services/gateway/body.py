"""Reads a request body without ever holding more than the limit."""

from starlette.requests import Request

from shared.errors import InvalidRequest, TooLarge


class ClientGone(Exception):
    """The client left before its request was complete."""


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body, at most ``limit`` bytes of it.

    Raises:
        TooLarge: by the announced length, before anything is read, or by the bytes that came.
        ClientGone: the connection ended first.
    """
    announced = request.headers.get("content-length", "0")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > limit:
        raise _too_large(limit)
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
            break
    if not size:
        raise InvalidRequest("the request has no body")
    return b"".join(parts)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body is larger than {limit} bytes (gateway.max_body)")
