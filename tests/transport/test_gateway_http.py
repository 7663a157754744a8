"""The OpenAI API on a real socket, before a router that follows a script."""

import asyncio

import openai
import pytest

from shared.errors import ErrorPayload
from shared.messages.gateway_router import Ended
from tests.conftest import RunAsync
from tests.transport.gateway_rig import expected, rig
from tests.unit.gateway_model import NAME
from tests.unit.gateway_model import tokenizer as tokenizer

pytestmark = pytest.mark.usefixtures("tokenizer")


def test_models(run_async: RunAsync) -> None:
    async def main() -> None:
        async with rig() as r:
            data = (await r.client.get("/v1/models")).json()["data"]
            assert [model["id"] for model in data] == [NAME]
            assert (await r.client.get(f"/v1/models/{NAME}")).json()["id"] == NAME
            answer = await r.client.get("/v1/models/nope")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")

    run_async(main())


def test_whole_and_streamed_completion_are_the_same(run_async: RunAsync) -> None:
    """Text split into chunks must be the text of the whole answer, character for character."""

    async def main() -> None:
        async with rig() as r:
            whole = await r.complete(max_tokens=40)
            assert whole["object"] == "text_completion"
            assert whole["choices"][0]["text"] == expected(40)
            assert whole["choices"][0]["finish_reason"] == "length"
            assert whole["usage"] == {
                "prompt_tokens": 4,
                "completion_tokens": 40,
                "total_tokens": 44,
                "prompt_tokens_details": {"cached_tokens": 3},
            }
            chunks = await r.stream("completions", prompt="Once upon a time", max_tokens=40)
            assert "".join(c["choices"][0]["text"] for c in chunks) == expected(40)
            assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "length"
            assert all("usage" not in c for c in chunks)

    run_async(main())


@pytest.mark.parametrize(
    "prompt",
    [["one", "two"], [5, 6, 7], [[5, 6, 7], [8, 9]]],
    ids=["texts", "ids", "lists of ids"],
)
def test_prompt_forms(run_async: RunAsync, prompt: list[object]) -> None:
    async def main() -> None:
        async with rig() as r:
            whole = await r.complete(prompt=prompt, max_tokens=5, n=2)
            prompts = 1 if prompt == [5, 6, 7] else 2
            assert [c["index"] for c in whole["choices"]] == list(range(2 * prompts))
            assert whole["usage"]["completion_tokens"] == 10 * prompts
            sent = [request.prompt_ids for request in r.router.requests]
            assert whole["usage"]["prompt_tokens"] == sum(map(len, sent)) // 2
            chunks = await r.stream("completions", prompt=prompt, max_tokens=5, n=2)
            for index in range(2 * prompts):
                parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
                assert "".join(p["text"] for p in parts) == expected(5)

    run_async(main())


def test_outputs_of_one_prompt_have_seeds_of_their_own(run_async: RunAsync) -> None:
    """n outputs with the same seed would be n times the same text."""

    async def main() -> None:
        async with rig() as r:
            await r.complete(max_tokens=2, n=3, seed=2**63 - 1)
            seeds = [request.sampling.seed for request in r.router.requests]
            assert seeds == [2**63 - 1, 0, 1]

    run_async(main())


def test_openai_client_chats(run_async: RunAsync) -> None:
    """The official client must parse whole answers, streams, usage, logprobs and errors."""

    async def main() -> None:
        async with rig() as r, openai.AsyncOpenAI(base_url=f"{r.url}/v1", api_key="x") as client:
            await whole_chat(client)
            await streamed_chat(client)
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model=NAME, messages=[], temperature=5)
            assert refused.value.param in ("temperature", "messages")
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.completions.create(model="gpt-9", prompt="x")
            assert unknown.value.code == "model_not_found"

    run_async(main())


async def whole_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        max_completion_tokens=9,
        logprobs=True,
        top_logprobs=2,
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected(9))
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    raw = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert raw.decode("utf-8", "replace") == expected(9)
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 9
    assert choice.logprobs.content[0].top_logprobs[0].logprob == -0.5
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def streamed_chat(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
        n=2,
    )
    texts, roles, reasons, usage = {0: "", 1: ""}, [], [], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts == {0: expected(40), 1: expected(40)}
    assert (roles, reasons) == (["assistant"] * 2, ["length"] * 2)
    assert usage is not None and usage.completion_tokens == 80


def test_end_token_is_counted_but_not_shown(run_async: RunAsync) -> None:
    async def main() -> None:
        async with rig() as r:
            r.router.end_after = 5
            whole = await r.complete(max_tokens=40)
            assert whole["choices"][0]["text"] == expected(4)
            assert whole["choices"][0]["finish_reason"] == "stop"
            assert whole["usage"]["completion_tokens"] == 5
            await r.complete(max_tokens=7, ignore_eos=True)
            assert r.router.requests[-1].sampling.stop_token_ids == ()

    run_async(main())


def test_stop_string_across_tokens_ends_the_work(run_async: RunAsync) -> None:
    """The text must end before the stop string, the router must hear a cancel."""

    async def main() -> None:
        async with rig() as r:
            fields = {
                "prompt": "Once upon a time",
                "max_tokens": 200,
                "stop": ["never", "fox 🦙 ju"],
            }
            whole = await r.complete(**fields)
            assert whole["choices"][0]["text"] == "The quick brown "
            assert whole["choices"][0]["finish_reason"] == "stop"
            assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
            assert whole["usage"]["completion_tokens"] < 20
            await r.router.until(lambda router: bool(router.cancelled))
            assert len(r.router.cancelled) == 1
            chunks = await r.stream("completions", **fields)
            assert "".join(c["choices"][0]["text"] for c in chunks) == "The quick brown "
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
            await r.idle()

    run_async(main())


def test_echo_with_logprobs(run_async: RunAsync) -> None:
    """Evaluation tools read the prompt's log probabilities from echoed completions."""

    async def main() -> None:
        async with rig() as r:
            prompt = "Once upon a time"
            whole = await r.complete(prompt=prompt, max_tokens=12, echo=True, logprobs=2)
            (choice,) = whole["choices"]
            assert choice["text"] == prompt + expected(12)
            scores = choice["logprobs"]
            assert [len(scores[k]) for k in scores] == [16] * 4
            assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
            assert scores["token_logprobs"][1] == -0.5
            for name, at in zip(scores["tokens"], scores["text_offset"], strict=True):
                if not name.startswith("bytes:"):
                    assert choice["text"][at:].startswith(name)
            chunks = await r.stream(
                "completions", prompt=prompt, max_tokens=12, echo=True, logprobs=2
            )
            parts = [c["choices"][0] for c in chunks]
            assert "".join(p["text"] for p in parts) == choice["text"]
            tokens = [t for p in parts if p["logprobs"] for t in p["logprobs"]["tokens"]]
            assert tokens == scores["tokens"]

    run_async(main())


def test_timeline_adds_up_to_ttft(run_async: RunAsync) -> None:
    """Phases that do not add up to the time to first token explain nothing."""

    async def main() -> None:
        async with rig() as r:
            whole = await r.complete(max_tokens=3, timeline=True)
            chunks = await r.stream("completions", prompt="x", max_tokens=3, timeline=True)
            for choice in (whole["choices"][0], chunks[-1]["choices"][0]):
                timeline = choice["timeline"]
                assert timeline["moments"]["split"] is True
                if timeline["phases"] is not None:
                    total = sum(timeline["phases"].values())
                    assert total == pytest.approx(timeline["ttft"], rel=0.01)

    run_async(main())


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_cancels_the_work(run_async: RunAsync, stream: bool) -> None:
    """A client that disconnects must not keep workers busy."""

    async def main() -> None:
        async with rig() as r:
            r.router.hold(3)
            asked = asyncio.create_task(
                r.post("completions", prompt="x", max_tokens=50, n=2, stream=stream)
            )
            await r.router.until(lambda router: len(router.running) == 2)
            asked.cancel()
            await asyncio.wait((asked,))
            await r.router.until(lambda router: len(router.cancelled) == 2)
            await r.idle()

    run_async(main())


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_router_restart_mid_stream_is_invisible(run_async: RunAsync, path: str) -> None:
    """The client's text must be that of an undisturbed run: nothing lost, nothing twice."""

    async def main() -> None:
        async with rig() as r:
            r.router.hold(10)
            fields = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
            task = asyncio.create_task(r.stream(path, max_tokens=40, n=4, **fields))
            await r.router.until(
                lambda router: sorted(x.next for x in router.running.values()) == [10] * 4
            )
            r.router.restart()
            r.router.release()
            texts = [""] * 4
            for chunk in await task:
                for choice in chunk["choices"]:
                    part = choice["text"] if "text" in choice else choice["delta"].get("content")
                    texts[choice["index"]] += part or ""
            assert texts == [expected(40)] * 4
            resumed = [request for request in r.router.requests if request.output_ids]
            assert len(resumed) == 4

    run_async(main())


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("overloaded", 429),
        ("worker_lost", 503),
        ("invalid_request", 400),
        ("numerical", 500),
        ("deadline_exceeded", 504),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_router_errors_keep_their_status(
    run_async: RunAsync, code: str, status: int, stream: bool
) -> None:
    """A stream refused before its first token must be a status code, not a 200."""

    async def main() -> None:
        async with rig() as r:
            r.router.refusal = ErrorPayload(code=code, message="sorry", retry_after=2.5)  # type: ignore[arg-type]
            answer = await r.post("completions", prompt="x", stream=stream)
            assert answer.status_code == status
            assert answer.json()["error"]["message"] == "sorry"
            assert answer.headers.get("retry-after") == ("3" if status in (429, 503) else None)

    run_async(main())


def test_error_mid_stream_is_an_event(run_async: RunAsync) -> None:
    async def main() -> None:
        async with rig() as r:
            r.router.hold(2)
            async with r.client.stream(
                "POST", "/v1/completions", json={"prompt": "x", "stream": True}
            ) as answer:
                lines = answer.aiter_lines()
                assert (await anext(lines)).startswith("data: ")
                (running,) = r.router.running.values()
                error = ErrorPayload(code="numerical", message="NaN in the logits")
                name = running.request.request_id
                r.router.link.send(running.peer, Ended(request_id=name, error=error))
                r.router.running.clear()
                rest = [line async for line in lines if line]
            assert "NaN in the logits" in rest[-2] and rest[-1] == "data: [DONE]"

    run_async(main())
