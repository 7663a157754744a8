"""The load client by itself: it measures what the server did, whatever the network does."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from shared.errors import BadConfig
from tests.conftest import RunAsync
from tools.bench.command import read_api_key
from tools.bench.load import Workload, bodies, one_request, run_load
from tools.bench.records import Record
from tools.bench.sse_client import SseClient, Target

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WORK = Workload(model="m", input_words=5, output_tokens=3, seed=1, timeout=5.0)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def token(text: str) -> bytes:
    return event({"choices": [{"text": text, "finish_reason": None}]})


END = (
    event({"choices": [{"text": "", "finish_reason": "length", "timeline": {"split": True}}]})
    + event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
    + b"data: [DONE]\n\n"
)


async def read_request(reader: asyncio.StreamReader) -> dict[str, object]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    (length,) = (line for line in head.splitlines() if line.startswith("content-length:"))
    body: dict[str, object] = json.loads(await reader.readexactly(int(length.split(":")[1])))
    return body


async def with_server(serve: Serve, use: Callable[[Target], Awaitable[Record]]) -> Record:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await use(Target.parse(f"http://127.0.0.1:{port}"))


async def once(target: Target) -> Record:
    client = SseClient(target)
    try:
        return await one_request(client, next(bodies(WORK)), 5.0)
    finally:
        client.close()


def answer_with(pieces: list[bytes]) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return serve


WHOLE = HEAD + chunk(token("a")) + chunk(token("b") + token("c")) + chunk(END) + chunk(b"")


@pytest.mark.parametrize("size", [1, 7, 64, len(WHOLE)])
def test_any_cut_of_the_stream_gives_the_same_record(run_async: RunAsync, size: int) -> None:
    """Guards: an event is counted once, wherever TCP cuts it."""
    pieces = [WHOLE[at : at + size] for at in range(0, len(WHOLE), size)]
    record = run_async(with_server(answer_with(pieces), once))
    assert record.error is None
    assert (len(record.events), record.prompt_tokens, record.output_tokens) == (3, 5, 3)
    assert record.timeline is not None and record.timeline.split


def test_a_huge_event_passes(run_async: RunAsync) -> None:
    """Guards: a 64 KiB line limit in the client would look like a server error."""
    whole = HEAD + chunk(token("x" * 300_000)) + chunk(END) + chunk(b"")
    record = run_async(with_server(answer_with([whole]), once))
    assert record.error is None


def test_windows_line_ends_pass(run_async: RunAsync) -> None:
    body = (token("a") + END).replace(b"\n", b"\r\n")
    record = run_async(with_server(answer_with([HEAD + chunk(body) + chunk(b"")]), once))
    assert record.error is None


def test_moments_are_those_of_arrival(run_async: RunAsync) -> None:
    """Guards: the stamp belongs to the event's last byte, between sending and receiving it."""
    sent: list[float] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD)
        for text in "abc":
            data = chunk(token(text))
            writer.write(data[:10])
            await asyncio.sleep(0.01)
            sent.append(time.monotonic())
            writer.write(data[10:])
        writer.write(chunk(END) + chunk(b""))

    record = run_async(with_server(serve, once))
    assert record.error is None
    assert all(at >= begun for at, begun in zip(record.events, sent, strict=True))
    assert record.events[0] < sent[1] and record.events[1] < sent[2]


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([HEAD + chunk(token("a"))], "ended early"),
        ([HEAD + chunk(token("a")) + chunk(b"")], "without text, finish reason or usage"),
        ([HEAD + chunk(b"data: {\n\n") + chunk(END) + chunk(b"")], "unreadable event"),
        ([b"SMTP ready\r\n\r\n"], "not HTTP"),
        ([b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nbusy"], "HTTP 429: busy"),
        ([HEAD + chunk(event({"error": {"message": "lost"}})) + chunk(b"")], "lost"),
    ],
)
def test_an_incomplete_answer_is_a_failure(
    run_async: RunAsync, pieces: list[bytes], words: str
) -> None:
    """Guards: a broken stream must not pass as a quick one."""
    record = run_async(with_server(answer_with(pieces), once))
    assert record.error is not None and words in record.error


def test_no_server_is_a_failed_record(run_async: RunAsync) -> None:
    record = run_async(once(Target.parse("http://127.0.0.1:1")))
    assert record.error is not None


def test_load_keeps_its_concurrency_and_its_connections(run_async: RunAsync) -> None:
    """Guards: closed loop means never more than N open, and no new connection per request."""
    open_now, most, connections, bodies_seen = 0, 0, 0, []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most, connections
        connections += 1
        while True:
            try:
                bodies_seen.append(await read_request(reader))
            except asyncio.IncompleteReadError:
                return
            open_now += 1
            most = max(most, open_now)
            await asyncio.sleep(0.001)
            open_now -= 1
            writer.write(WHOLE)

    async def load() -> list[Record]:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await serve(reader, writer)
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            target = Target.parse(f"http://127.0.0.1:{port}")
            return await run_load(target, WORK, 4, 20, lambda: None)

    records = run_async(load())
    assert [r.error for r in records] == [None] * 20
    assert (most, connections) == (4, 4)
    prompts = [body["prompt"] for body in bodies_seen]
    assert len(set(map(str, prompts))) == 20
    assert all(body["ignore_eos"] and body["min_tokens"] == 3 for body in bodies_seen)


@pytest.mark.parametrize("content", ["", "two words", "a\nb", "k\r\nX-Evil: 1", "schlüssel"])
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, content: str) -> None:
    """Line breaks in a header would be headers of their own."""
    (tmp_path / "key").write_text(content)
    with pytest.raises(BadConfig, match="--api-key-file"):
        read_api_key(tmp_path / "key")
    with pytest.raises(BadConfig, match="--api-key-file"):
        read_api_key(tmp_path / "absent")


def test_the_key_of_the_file_goes_with_every_request(tmp_path: Path, run_async: RunAsync) -> None:
    (tmp_path / "key").write_text("sk-secret\n")
    heads: list[str] = []

    async def main() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            await once(Target.parse(url, read_api_key(tmp_path / "key")))

    run_async(main())
    assert "\r\nAuthorization: Bearer sk-secret\r\n" in heads[0]
