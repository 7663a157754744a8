"""Connections that ask for nothing, or never finish asking, must not lock anybody out."""

import asyncio
import contextlib

import pytest

from services.gateway import http_protocol
from tests.conftest import RunAsync
from tests.transport.gateway_rig import Rig, rig
from tests.unit.gateway_model import tokenizer as tokenizer

pytestmark = pytest.mark.usefixtures("tokenizer")

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
BODY = b'{"prompt": "Once upon a time", "max_tokens": 40, "stream": true}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)


async def connect(r: Rig, sent: bytes) -> Connection:
    host, port = r.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    await writer.drain()
    return reader, writer


async def close(connections: list[Connection]) -> None:
    for _, writer in connections:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTT", b"GET /livez HTTP/1.1\r\nX: "])
def test_a_head_that_does_not_come_ends_the_connection(
    run_async: RunAsync, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Silent sockets stayed open for ever, so some 2,000 of them answered everybody with 503."""
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT", 0.3)

    async def main() -> None:
        async with rig() as r:
            connection = await connect(r, sent)
            async with asyncio.timeout(5):
                assert await connection[0].read() == b""
            await close([connection])
            assert await r.complete(max_tokens=2)

    run_async(main())


def test_half_a_request_after_a_whole_one_ends_the_connection_too(
    run_async: RunAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT", 0.3)

    async def main() -> None:
        async with rig() as r:
            connection = await connect(r, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in await connection[0].readuntil(b"alive")
            await asyncio.sleep(0.6)  # an idle kept connection is fine
            connection[1].write(b"GET /livez HTTP/1.1\r\nHo")
            async with asyncio.timeout(5):
                assert await connection[0].read() == b'"}'
            await close([connection])

    run_async(main())


def test_half_a_pipelined_request_does_not_end_the_stream_before_it(
    run_async: RunAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT", 0.2)

    async def main() -> None:
        async with rig() as r:
            r.router.hold(tokens=3)
            connection = await connect(r, POST + b"GET /livez HTTP/1.1\r\n")
            await connection[0].readuntil(b"data: ")
            await asyncio.sleep(0.7)
            r.router.release()
            async with asyncio.timeout(5):
                rest = await connection[0].read()
            assert b"data: [DONE]" in rest
            await close([connection])

    run_async(main())


def test_an_endless_head_is_cut_off(run_async: RunAsync) -> None:
    """A head of any size was collected in memory."""

    async def main() -> None:
        async with rig() as r:
            connection = await connect(r, b"GET /livez HTTP/1.1\r\nX: ")
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                for _ in range(64):
                    connection[1].write(b"a" * (64 << 10))
                    await connection[1].drain()
                await connection[0].readexactly(1 << 20)
            await close([connection])
            assert await r.complete(max_tokens=2)

    run_async(main())


def test_too_many_connections_are_told_so_in_openais_shape(run_async: RunAsync) -> None:
    """The answer was plain text, and `/livez` said the process is dead."""

    async def main() -> None:
        async with rig(max_open=8) as r:
            crowd = [await connect(r, b"GET") for _ in range(2 * 8 + 64)]
            assert (await r.client.get("/livez")).status_code == 200
            answer = await r.post("completions", prompt="x")
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "overloaded"
            await close(crowd)
            async with asyncio.timeout(5):
                while r.gateway.http.num_connections > 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert await r.complete(max_tokens=2)

    run_async(main())


def test_leaving_ends_every_pipelined_request(run_async: RunAsync) -> None:
    """Only the last request of the connection heard of it; the first one ran to its end."""

    async def main() -> None:
        async with rig() as r:
            r.router.hold(tokens=3)
            connection = await connect(r, POST + POST)
            await connection[0].readuntil(b"data: ")
            await close([connection])
            async with asyncio.timeout(5):
                await r.router.until(lambda router: len(router.cancelled) >= 1)
            assert r.gateway.broker.state.num_open == 0

    run_async(main())
