"""Bad requests: 4xx with the field's name, nothing reaches the router, the server lives."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import RunAsync
from tests.transport.gateway_rig import MAX_MODEL_LEN, Rig, rig
from tests.unit.gateway_model import NAME
from tests.unit.gateway_model import tokenizer as tokenizer

pytestmark = pytest.mark.usefixtures("tokenizer")

MANY = ["a"] * 17
BOTH: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "gpt-9"}, 404, "model"),
    ({"model": 5}, 400, "model"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": 2.1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 1.1}, 400, "top_p"),
    ({"top_p": -1}, 400, "top_p"),
    ({"top_k": -2}, 400, "top_k"),
    ({"top_k": 1.5}, 400, "top_k"),
    ({"min_p": 2}, 400, "min_p"),
    ({"seed": "x"}, 400, "seed"),
    ({"seed": 2**64}, 400, "seed"),
    ({"n": 0}, 400, "n"),
    ({"n": 129}, 400, "n"),
    ({"n": True}, 400, "n"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": -5}, 400, "max_tokens"),
    ({"max_tokens": MAX_MODEL_LEN}, 400, "max_tokens"),
    ({"max_completion_tokens": 10**6}, 400, "max_completion_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, 400, "min_tokens"),
    ({"min_tokens": -1}, 400, "min_tokens"),
    ({"presence_penalty": 3}, 400, "presence_penalty"),
    ({"frequency_penalty": -3}, 400, "frequency_penalty"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"stop": ""}, 400, "stop"),
    ({"stop": ["a", ""]}, 400, "stop"),
    ({"stop": MANY}, 400, "stop"),
    ({"stop": 5}, 400, "stop"),
    ({"stop": ["a", 5]}, 400, "stop[1]"),
    ({"stop_token_ids": [10**6]}, 400, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, 400, "stop_token_ids[0]"),
    ({"logit_bias": {"1": 101}}, 400, "logit_bias"),
    ({"logit_bias": {"a": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, 400, "logit_bias"),
    ({"ignore_eos": "yes"}, 400, "ignore_eos"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 5}}, 400, "stream_options.include_usage"),
    ({"user": 5}, 400, "user"),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema.schema"),
    ({"response_format": 5}, 400, "response_format"),
]
COMPLETIONS: list[tuple[dict[str, Any], int, str | None]] = [
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": ["a", 5]}, 400, "prompt"),
    ({"prompt": [1, True]}, 400, "prompt"),
    ({"prompt": {"a": 1}}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [49152]}, 400, "prompt"),
    ({"prompt": [10**30]}, 400, "prompt"),
    ({"prompt": [5] * MAX_MODEL_LEN}, 400, "prompt"),
    ({"prompt": "word " * 300}, 400, "prompt"),
    ({"prompt": "word " * 200_000}, 400, "prompt"),
    ({"prompt": ["a"] * 257}, 400, "prompt"),
    ({"prompt": ["a"] * 200, "n": 2}, 400, "n"),
    ({"suffix": "x"}, 400, "suffix"),
    ({"best_of": 2}, 400, "best_of"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"echo": 1}, 400, "echo"),
]
USER = {"role": "user", "content": "x"}
CHAT: list[tuple[dict[str, Any], int, str | None]] = [
    ({"messages": None}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, 400, "messages[0]"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [USER, {"role": "user", "content": 5}]}, 400, "messages[1].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "word " * 300}]}, 400, "messages"),
    ({"logprobs": 1}, 400, "logprobs"),
    ({"top_logprobs": 3}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, 400, "tools"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"functions": [{}]}, 400, "functions"),
    ({"modalities": ["audio"]}, 400, "modalities"),
    ({"audio": {}}, 400, "audio"),
]


async def refused(r: Rig, path: str, fields: dict[str, Any], status: int, param: object) -> None:
    answer = await r.post(path, **fields)
    assert answer.status_code == status, (fields, answer.text[:300])
    error = answer.json()["error"]
    assert error["param"] == param, (fields, error)
    assert error["message"] and error["type"], fields
    assert len(error["message"]) < 500, fields


def test_every_bad_field_is_named(run_async: RunAsync) -> None:
    """A client must learn which field to change, and a bad request must cost no worker time."""

    async def main() -> None:
        async with rig() as r:
            for fields, status, param in BOTH:
                await refused(r, "completions", {"prompt": "x"} | fields, status, param)
                await refused(r, "chat/completions", {"messages": [USER]} | fields, status, param)
            for fields, status, param in COMPLETIONS:
                await refused(r, "completions", {"prompt": "x"} | fields, status, param)
            for fields, status, param in CHAT:
                await refused(r, "chat/completions", {"messages": [USER]} | fields, status, param)
            assert r.router.requests == []
            assert await r.complete(max_tokens=2)

    run_async(main(), 60.0)


def test_context_length_error_gives_the_numbers(run_async: RunAsync) -> None:
    async def main() -> None:
        async with rig() as r:
            error = (await r.post("completions", prompt=[5] * 300)).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "256" in error["message"] and "300" in error["message"]
            await r.complete(prompt=[5] * (MAX_MODEL_LEN - 1), max_tokens=1)

    run_async(main())


def test_what_openai_clients_send_besides_is_accepted(run_async: RunAsync) -> None:
    """Fields without a meaning here must not break clients that always send them."""

    async def main() -> None:
        async with rig() as r:
            extra = {
                "store": False,
                "metadata": {"a": "b"},
                "service_tier": "auto",
                "reasoning_effort": "low",
                "tools": [],
                "tool_choice": "none",
                "modalities": ["text"],
                "stop": None,
                "logit_bias": None,
                "response_format": {"type": "text"},
                "something_new": [1, 2],
            }
            answer = await r.post("chat/completions", messages=[USER], max_tokens=2, **extra)
            assert answer.status_code == 200
            await r.complete(best_of=2, n=2, top_p=0, top_k=-1)
            assert r.router.requests[-1].sampling.top_k == 1

    run_async(main())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b'{"model": "\xff"}', None),
        (b'{"model": "\\ud800"}', None),
        (b'{"prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"prompt": "x", "top_p": -Infinity}', "top_p"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "x"} {}', None),
        (b'{"prompt": ' + b"[" * 100_000, None),
        (b"\x00" * 100, None),
    ],
)
def test_bodies_that_are_no_json(run_async: RunAsync, body: bytes, param: str | None) -> None:
    async def main() -> None:
        async with rig() as r:
            for path in ("completions", "chat/completions"):
                answer = await r.client.post(f"/v1/{path}", content=body)
                assert answer.status_code == 400, answer.text
                assert answer.json()["error"]["param"] == param

    run_async(main())


@pytest.mark.parametrize("announced", [True, False])
def test_huge_body_is_refused(run_async: RunAsync, announced: bool) -> None:
    """10 MB are not kept, and the client still gets to read why."""

    async def parts() -> Any:
        for _ in range(160):
            yield b"x" * 65536

    async def main() -> None:
        async with rig() as r:
            content = b"x" * 10_000_000 if announced else parts()
            answer = await r.client.post("/v1/completions", content=content)
            assert answer.status_code == 413
            assert "8388608" in answer.json()["error"]["message"]
            assert await r.complete(max_tokens=2)

    run_async(main())


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 99999999999999\r\n",
        b"Content-Length: 10000000\r\nExpect: 100-continue\r\n",
    ],
)
def test_announced_length_is_enough_to_refuse(run_async: RunAsync, headers: bytes) -> None:
    """A client that waits for `100 Continue` must be told before it sends anything."""

    async def main() -> None:
        async with rig() as r:
            host, port = r.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
            assert b" 413 " in await reader.readuntil(b"\r\n")
            await reader.read()
            writer.close()
            await writer.wait_closed()

    run_async(main())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405)],
)
def test_wrong_paths_and_methods(run_async: RunAsync, method: str, path: str, status: int) -> None:
    async def main() -> None:
        async with rig() as r:
            answer = await r.client.request(method, path)
            assert answer.status_code == status
            assert answer.json()["error"]["type"] == "invalid_request_error"

    run_async(main())


def test_json_schemas_are_checked_before_any_worker(run_async: RunAsync) -> None:
    """An invalid or costly schema must be a 400 here, not a failure in a worker."""

    def form(schema: object) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    async def main() -> None:
        async with rig() as r:
            bad: list[object] = [
                {"type": "banana"},
                {"type": "object", "properties": 5},
                {"$ref": "#/nowhere"},
                {"type": "string", "pattern": "("},
                {"type": "object", "description": "x" * 70_000},
                {"type": "y" * 65_500},  # its quotation made a verdict too long to be read: 500
            ]
            param = "response_format.json_schema.schema"
            for schema in bad:
                fields = {"messages": [USER], "response_format": form(schema)}
                await refused(r, "chat/completions", fields, 400, param)
            assert r.router.requests == []
            good = {"type": "object", "properties": {"a": {"type": "integer"}}}
            fields = {"prompt": "x", "max_tokens": 3, "response_format": form(good)}
            assert (await r.post("completions", **fields)).status_code == 200
            grammar = r.router.requests[0].sampling.grammar
            assert grammar is not None and json.loads(grammar.schema) == good

    run_async(main(), 60.0)


def test_schema_that_takes_for_ever_is_refused(
    run_async: RunAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checker is ended and started anew; the next schema gets its answer."""
    monkeypatch.setattr("services.gateway.grammar.CHECK_TIMEOUT", 0.0)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}

    async def main() -> None:
        async with rig() as r:
            fields = {"messages": [USER], "response_format": form}
            param = "response_format.json_schema.schema"
            await refused(r, "chat/completions", fields, 400, param)
            monkeypatch.undo()
            assert (await r.post("chat/completions", max_tokens=2, **fields)).status_code == 200

    run_async(main(), 60.0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = (
    *("prompt", "messages", "model", "n", "stream", "stop", "seed", "temperature", "top_p"),
    *("top_k", "logprobs", "echo", "logit_bias", "max_tokens", "min_tokens", "stream_options"),
    *("response_format", "tools", "timeline", "user", "best_of"),
)


def test_no_body_kills_the_server(run_async: RunAsync) -> None:
    """Random fields and random bytes: an answer below 500 each time, and no leaked request."""
    documents = st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=6)
    bodies = documents.map(lambda d: json.dumps(d).encode()) | st.binary(max_size=60)
    path = st.sampled_from(["completions", "chat/completions"])

    async def main() -> None:
        async with rig() as r:
            loop = asyncio.get_running_loop()

            @settings(
                max_examples=150,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow],
                database=None,
            )
            @given(path, bodies)
            def attack(path: str, body: bytes) -> None:
                sent = r.client.post(f"/v1/{path}", content=body)
                answer = asyncio.run_coroutine_threadsafe(sent, loop).result(20)
                assert answer.status_code < 500, (body, answer.text)

            await asyncio.to_thread(attack)
            assert await r.complete(model=NAME, max_tokens=2)
            await r.idle()

    run_async(main(), 90.0)


def test_garbage_instead_of_http(run_async: RunAsync) -> None:
    async def main() -> None:
        async with rig() as r:
            host, port = r.url.removeprefix("http://").split(":")
            for garbage in (
                b"\x00" * 1000,
                b"GET\r\n\r\n",
                b"POST / HTTP/9.9\r\n\r\n",
                b"\xff\xfe",
            ):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(garbage)
                writer.write_eof()
                await reader.read()
                writer.close()
                await writer.wait_closed()
            assert await r.complete(max_tokens=2)

    run_async(main())
