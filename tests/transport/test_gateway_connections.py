"""Connections that ask for nothing, or never finish asking, must not lock anybody out."""

import asyncio
import contextlib
import socket

import msgspec
import pytest

from services.gateway import http_protocol
from tests.conftest import RunAsync
from tests.transport.gateway_rig import Rig, expected, rig
from tests.transport.harness import DEADLINE
from tests.unit.gateway_model import tokenizer as tokenizer

pytestmark = pytest.mark.usefixtures("tokenizer")

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
STREAM = {"prompt": "Once upon a time", "max_tokens": 40, "stream": True}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def post(fields: dict[str, object], version: bytes = b"1.1") -> bytes:
    body = msgspec.json.encode(fields)
    head = b"POST /v1/completions HTTP/%b\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    return head % (version, len(body)) + body


POST = post(STREAM)


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
            async with asyncio.timeout(DEADLINE):
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
            async with asyncio.timeout(DEADLINE):
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
            async with asyncio.timeout(DEADLINE):
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
            async with asyncio.timeout(DEADLINE):
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
            async with asyncio.timeout(DEADLINE):
                await r.router.until(lambda router: len(router.cancelled) >= 1)
            assert r.gateway.broker.state.num_open == 0

    run_async(main())


def test_a_client_that_only_ends_its_sending_side_gets_the_whole_answer(
    run_async: RunAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nc -N` got an empty answer: its FIN was taken for a client that has left."""
    monkeypatch.setattr(http_protocol, "PROBE_FIRST", 0.05)

    async def main() -> None:
        async with rig() as r:
            r.router.hold()
            reader, writer = await connect(r, post(STREAM | {"stream": False}))
            writer.write_eof()
            assert await reader.readexactly(3 * len(CONTINUE)) == 3 * CONTINUE
            r.router.release()
            head, _, body = (await reader.read()).replace(CONTINUE, b"").partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK") and b"connection: close" in head
            assert msgspec.json.decode(body)["choices"][0]["text"] == expected(40)
            assert not r.router.cancelled
            await close([(reader, writer)])

    run_async(main())


def test_a_client_that_ends_its_sending_side_within_a_stream_gets_the_rest(
    run_async: RunAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream broke off after the token that was on its way; a comment must not change it."""
    monkeypatch.setattr(http_protocol, "PROBE_FIRST", 0.05)

    async def main() -> None:
        async with rig() as r:
            r.router.hold(tokens=3)
            reader, writer = await connect(r, POST)
            stream = await reader.readuntil(b"data: ")
            writer.write_eof()
            for _ in range(3):
                stream += await reader.readuntil(b"\r\n:\n\n\r\n")
            r.router.release()
            stream += await reader.read()
            assert stream.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            events = [e for e in dechunked(stream).split(b"\n\n") if e.startswith(b"data: {")]
            chunks = [msgspec.json.decode(e.removeprefix(b"data: ")) for e in events]
            assert "".join(c["choices"][0]["text"] for c in chunks) == expected(40)
            await close([(reader, writer)])

    run_async(main())


def test_a_client_that_sends_no_more_must_acknowledge_what_it_is_sent(
    run_async: RunAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a container that is gone with its client no kernel is left to break the connection."""
    monkeypatch.setattr(http_protocol, "PROBE_TIMEOUT", 7.0)

    async def main() -> None:
        async with rig() as r:
            r.router.hold()
            reader, writer = await connect(r, POST)
            writer.write_eof()
            await reader.readuntil(CONTINUE)
            (protocol,) = r.gateway.http._server.server_state.connections
            peer = protocol.transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
            await close([(reader, writer)])

    run_async(main())


@pytest.mark.parametrize("half_first", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed_although_nothing_is_written_to_it(
    run_async: RunAsync,
    monkeypatch: pytest.MonkeyPatch,
    half_first: bool,
    tokens: int,
    stream: bool,
) -> None:
    """Told apart by the answer's bytes alone, the work of one that left would run to its end."""
    monkeypatch.setattr(http_protocol, "PROBE_FIRST", 0.05)

    async def main() -> None:
        async with rig() as r:
            r.router.hold(tokens)
            reader, writer = await connect(r, post(STREAM | {"stream": stream}))
            await r.router.until(lambda router: len(router.running) == 1)
            if stream and tokens:
                await reader.readuntil(b"data: ")
            if half_first:
                writer.write_eof()
                await reader.readuntil(b":\n\n" if stream and tokens else CONTINUE)
            await close([(reader, writer)])
            async with asyncio.timeout(DEADLINE):
                await r.router.until(lambda router: len(router.cancelled) == 1)
            await r.idle()

    run_async(main())


@pytest.mark.parametrize("sent", [POST[:-1], post(STREAM | {"stream": False}, b"1.0")])
def test_a_sending_side_that_ends_too_early_ends_the_connection(
    run_async: RunAsync, sent: bytes
) -> None:
    """Half a body never comes whole, and HTTP/1.0 knows nothing to ask a silent client with."""

    async def main() -> None:
        async with rig() as r:
            r.router.hold()
            reader, writer = await connect(r, sent)
            if sent.endswith(b"}"):
                await r.router.until(lambda router: len(router.running) == 1)
            writer.write_eof()
            async with asyncio.timeout(DEADLINE):
                assert await reader.read() == b""
            await r.idle()
            await close([(reader, writer)])

    run_async(main())


def dechunked(answer: bytes) -> bytes:
    """Return the body of a chunked answer."""
    rest, body = answer.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body
