"""The SDK's endpoint: the real client against a real gateway before a scripted router."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import diptych
from diptych import wire
from shared.transport.link import DealerLink
from tests.conftest import RunAsync
from tests.transport.gateway_rig import Rig, expected, rig
from tests.unit.gateway_model import NAME
from tests.unit.gateway_model import tokenizer as tokenizer

pytestmark = pytest.mark.usefixtures("tokenizer")


@asynccontextmanager
async def sdk(r: Rig, **options: Any) -> AsyncIterator[diptych.AsyncClient]:
    async with diptych.AsyncClient(r.config.client_endpoint, **options) as client:
        yield client


def test_generate_stream_and_chat(run_async: RunAsync) -> None:
    async def main() -> None:
        async with rig() as r, sdk(r) as client:
            ready = await client.wait_ready(5.0)
            assert (ready.model, ready.max_model_len) == (NAME, 256)
            done = await client.generate("Once upon a time", max_tokens=40, timeline=True)
            assert done.text == expected(40)
            assert (done.finish_reason, len(done.token_ids)) == ("length", 40)
            assert (done.usage.prompt_tokens, done.usage.cached_tokens) == (4, 3)
            assert done.timeline is not None and done.timeline.split
            r.router.hold(9)  # the others come when the first have been read
            chunks = []
            async for chunk in client.stream([5, 6, 7], max_tokens=40):
                chunks.append(chunk)
                r.router.release()
            assert "".join(c.text for c in chunks) == expected(40)
            assert len(chunks) > 1
            chat = await client.chat([{"role": "user", "content": "hi"}], max_tokens=9)
            assert chat.text == expected(9)
            fleet = await client.status()
            assert fleet["uptime"] == 1.0

    run_async(main())


def test_logprobs_of_prompt_and_output(run_async: RunAsync) -> None:
    async def main() -> None:
        async with rig() as r, sdk(r) as client:
            done = await client.generate(
                "Once upon a time", max_tokens=5, logprobs=2, prompt_logprobs=1
            )
            assert done.logprobs is not None and done.prompt_logprobs is not None
            assert [(score.token, len(score.top)) for score in done.logprobs] == [
                (token, 2) for token in done.token_ids
            ]
            assert len(done.prompt_logprobs) == 3

    run_async(main())


def test_stop_string_is_cut_and_cancels(run_async: RunAsync) -> None:
    async def main() -> None:
        async with rig() as r, sdk(r) as client:
            done = await client.generate("x", max_tokens=200, stop=["fox 🦙 ju"])
            assert (done.text, done.finish_reason) == ("The quick brown ", "stop")
            assert done.usage.completion_tokens == len(done.token_ids)
            await r.router.until(lambda router: len(router.cancelled) == 1)

    run_async(main())


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ("", {}, "prompt"),
        ([49152], {}, "token_ids"),
        ("x", {"temperature": -1.0}, "temperature"),
        ("x", {"top_p": float("nan")}, "top_p"),
        ("x", {"stop": [""]}, "stop"),
        ("x", {"max_tokens": 10**6}, "max_tokens"),
        ("x", {"logit_bias": {10**6: 1.0}}, "logit_bias"),
    ],
)
def test_bad_parameters_name_the_field(
    run_async: RunAsync, prompt: Any, params: dict[str, Any], param: str
) -> None:
    async def main() -> None:
        async with rig() as r, sdk(r) as client:
            with pytest.raises(diptych.InvalidRequest) as refused:
                await client.generate(prompt, **params)
            assert refused.value.param == param
            assert r.router.requests == []

    run_async(main())


def test_leaving_a_stream_cancels_the_work(run_async: RunAsync) -> None:
    async def main() -> None:
        async with rig() as r, sdk(r) as client:
            r.router.hold(3)
            async with client.stream("x", max_tokens=50) as stream:
                await anext(stream)
            await r.router.until(lambda router: len(router.cancelled) == 1)

    run_async(main())


@pytest.mark.parametrize("how", ["router", "crash", "drain"])
def test_restart_mid_stream_is_invisible(run_async: RunAsync, how: str) -> None:
    """Router or gateway may go at any moment: nothing lost, nothing twice."""

    async def main() -> None:
        async with rig() as r, sdk(r) as client:
            r.router.hold(10)
            streams = [asyncio.create_task(collect(client)) for _ in range(4)]
            await r.router.until(
                lambda router: sorted(x.next for x in router.running.values()) == [10] * 4
            )
            if how == "router":
                r.router.restart()
            else:
                if how == "drain":
                    await r.drain()
                await r.close()
                r.router.running.clear()
                await r.start()
            r.router.release()
            assert await asyncio.gather(*streams) == [expected(40)] * 4

    run_async(main(), 40.0)


async def collect(client: diptych.AsyncClient) -> str:
    return "".join([chunk.text async for chunk in client.stream("x", max_tokens=40)])


def test_key_is_needed_and_selects_the_tenant(run_async: RunAsync) -> None:
    async def main() -> None:
        async with rig(api_keys={"k1": "red"}) as r:
            async with sdk(r) as stranger:
                with pytest.raises(diptych.Unauthorized):
                    await stranger.generate("x")
            async with sdk(r, api_key="k1") as client:
                await client.generate("x", max_tokens=2)
            assert [request.tenant for request in r.router.requests] == ["red"]

    run_async(main())


class RawClient:
    """A client that says what it likes."""

    def __init__(self, r: Rig, incarnation: int = 7, session: int = 1) -> None:
        self.inbox: asyncio.Queue[wire.ToClient] = asyncio.Queue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.link: DealerLink[wire.ToClient, wire.FromClient] = DealerLink(
            self._context,
            r.config.client_endpoint,
            wire.routing_id(incarnation, session),
            wire.ToClient,
            self.inbox.put_nowait,
        )
        self.hello = wire.ClientHello(
            wire_version=wire.WIRE_VERSION, incarnation=incarnation, session=session
        )

    async def ask(self, message: wire.FromClient) -> wire.ToClient:
        self.link.send(message)
        return await self.inbox.get()

    async def greet(self) -> None:
        assert isinstance(await self.ask(self.hello), wire.Welcome)

    def close(self) -> None:
        self.link.close()
        self._context.term()


@asynccontextmanager
async def raw(r: Rig, **options: int) -> AsyncIterator[RawClient]:
    client = RawClient(r, **options)
    try:
        yield client
    finally:
        client.close()


def test_used_request_id_is_refused(run_async: RunAsync) -> None:
    """A duplicate id must neither disturb the first request nor start a second."""

    async def main() -> None:
        async with rig() as r, raw(r) as client:
            await client.greet()
            r.router.hold(1)
            assert isinstance(await client.ask(wire.Submit(id=5, prompt="x")), wire.Accepted)
            assert isinstance(await client.inbox.get(), wire.Delta)
            for number in (5, 4):
                ended = await client.ask(wire.Submit(id=number, prompt="x"))
                assert isinstance(ended, wire.Ended) and ended.error is not None
                assert (ended.error.code, ended.error.param) == ("invalid_request", "id")
            assert len(r.router.requests) == 1
            ended = await client.ask(wire.Cancel(id=5))
            assert isinstance(ended, wire.Ended) and ended.error is ended.reason is None

    run_async(main())


def test_whole_output_is_ended_at_once(run_async: RunAsync) -> None:
    """All tokens received, the end lost: the answer must not cost a generation."""

    async def main() -> None:
        async with rig() as r, raw(r) as client:
            await client.greet()
            params = wire.SamplingParams(max_tokens=3)
            submit = wire.Submit(id=1, token_ids=(5,), params=params, received=(9, 10, 11))
            assert isinstance(await client.ask(submit), wire.Accepted)
            ended = await client.inbox.get()
            assert isinstance(ended, wire.Ended)
            assert (ended.reason, ended.num_tokens) == ("length", 3)
            assert r.router.requests == []

    run_async(main())


def test_messages_without_a_session_are_counted(run_async: RunAsync) -> None:
    async def main() -> None:
        async with rig() as r, raw(r) as client:
            client.link.send(wire.Submit(id=1, prompt="x"))
            pong = await client.ask(wire.Ping())
            assert isinstance(pong, wire.Pong) and pong.session == 0
            assert r.gateway.clients.dropped == 1
            assert r.router.requests == []

    run_async(main())


def test_hello_must_fit(run_async: RunAsync) -> None:
    async def main() -> None:
        async with rig() as r, raw(r, session=2) as client:
            for change in ({"wire_version": 99}, {"session": 3}, {"incarnation": 8}):
                hello = msgspec.structs.replace(client.hello, **change)
                assert isinstance(await client.ask(hello), wire.Refused)
            await client.greet()
            async with raw(r, session=1) as earlier:
                assert isinstance(await earlier.ask(earlier.hello), wire.Refused)

    run_async(main())


def test_silent_client_is_cancelled(run_async: RunAsync, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that vanished without a word must not keep workers busy."""
    monkeypatch.setattr(wire, "PEER_TIMEOUT", 0.3)

    async def main() -> None:
        async with rig() as r, raw(r) as client:
            await client.greet()
            r.router.hold(1)
            client.link.send(wire.Submit(id=1, prompt="x"))
            await r.router.until(lambda router: len(router.cancelled) == 1)
            assert r.gateway.clients.num_sessions == 0

    run_async(main())


def test_random_frames_are_counted_and_harmless(run_async: RunAsync) -> None:
    """Whatever arrives on the socket, the gateway lives and answers the next client."""
    hello = wire.ClientHello(wire_version=wire.WIRE_VERSION, incarnation=7, session=1)
    submit = wire.Submit(id=1, prompt="x", params=wire.SamplingParams(max_tokens=3))
    valid = [msgspec.msgpack.encode(m) for m in (hello, submit, wire.Cancel(id=1), wire.Ping())]
    flipped = st.builds(
        lambda frame, at, byte: frame[:at] + bytes([byte]) + frame[at + 1 :],
        st.sampled_from(valid),
        st.integers(0, 60),
        st.integers(0, 255),
    )
    frames = st.lists(st.sampled_from(valid) | flipped | st.binary(max_size=40), max_size=8)

    async def main() -> None:
        async with rig() as r:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.ROUTING_ID, wire.routing_id(7, 1))
            socket.setsockopt(zmq.LINGER, 500)
            socket.connect(r.config.client_endpoint)

            @settings(
                max_examples=150,
                deadline=None,
                database=None,
                suppress_health_check=[HealthCheck.too_slow],
            )
            @given(frames, st.booleans())
            def attack(frames: list[bytes], together: bool) -> None:
                if together and frames:
                    socket.send_multipart(frames)
                for frame in frames:
                    socket.send(frame)

            await asyncio.to_thread(attack)
            async with sdk(r) as client:
                assert (await client.generate("x", max_tokens=4)).text == expected(4)
            assert r.gateway.clients.rejected > 0
            socket.close()
            context.term()

    run_async(main(), 60.0)
