"""Event streams past the ordinary way of ASGI: clients that read late, and answers that break."""

import asyncio
import socket
from typing import Any

import httpx
import msgspec
import pytest

from services.gateway.completion_text import CompletionText
from tests.conftest import RunAsync
from tests.transport.gateway_rig import expected, rig

TOKENS = 240
OUTPUTS = 48
"""Together they are larger than the buffers of a connection."""


def test_a_client_that_reads_late_gets_every_token_in_order(run_async: RunAsync) -> None:
    """Parts that a full connection does not take at once must neither be lost nor overtake."""

    async def main() -> None:
        async with rig() as running:
            listener: socket.socket = running.gateway.http._listener
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
            fields = {"prompt": "a", "n": OUTPUTS, "max_tokens": TOKENS, "stream": True}
            request = running.client.stream("POST", "/v1/completions", json=fields)
            async with request as answer:
                await running.router.until(lambda r: len(r.requests) == OUTPUTS and not r.running)
                texts = [""] * OUTPUTS
                async for line in answer.aiter_lines():
                    for choice in _choices(line):
                        texts[choice["index"]] += choice["text"]
            assert texts == [expected(TOKENS)] * OUTPUTS

    run_async(main())


def test_an_answer_that_cannot_be_written_ends_its_connection_and_its_work(
    run_async: RunAsync, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream would hang, or go on with a hole in its text."""
    whole, count = CompletionText.chunk, 0

    def breaking(self: CompletionText, choice: Any) -> bytes:
        nonlocal count
        count += 1
        if count == 3:
            raise RuntimeError("no such text")
        return whole(self, choice)

    monkeypatch.setattr(CompletionText, "chunk", breaking)

    async def main() -> None:
        async with rig() as running:
            fields = {"prompt": "a", "max_tokens": 200, "stream": True}
            with pytest.raises(httpx.RemoteProtocolError):
                async with running.client.stream("POST", "/v1/completions", json=fields) as answer:
                    async for _ in answer.aiter_lines():
                        await asyncio.sleep(0)
            await running.idle()
            monkeypatch.setattr(CompletionText, "chunk", whole)
            assert await running.complete(max_tokens=3)

    run_async(main())
    assert "no such text" in caplog.text


def _choices(line: str) -> list[Any]:
    if not line or line == "data: [DONE]":
        return []
    found: list[Any] = msgspec.json.decode(line.removeprefix("data: "))["choices"]
    return found
