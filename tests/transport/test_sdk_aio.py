"""The asyncio client against a scripted gateway on real sockets."""

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from diptych import AsyncClient, Cancelled, ConnectionLost, Overloaded, Timeout
from diptych.wire import Bye, Cancel, Ended, Submit, WireError
from tests.transport.sdk_gateway import ScriptedGateway, ipc

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ScriptedGateway]:
    with ScriptedGateway(ipc(tmp_path)) as gateway:
        yield gateway


async def script(step: Callable[[], T]) -> T:
    """Run a step of the gateway's script in a thread, so that the loop goes on."""
    return await asyncio.to_thread(step)


def test_generate_chat_and_ready(gateway: ScriptedGateway, run_async: Run[None]) -> None:
    async def main() -> None:
        async with AsyncClient(gateway.endpoint) as client:
            ready, _ = await asyncio.gather(client.wait_ready(), script(gateway.expect_hello))
            assert ready.model == "tiny"
            out, _ = await asyncio.gather(
                client.generate("hi"), script(lambda: gateway.answer("abc"))
            )
            assert out.text == "abc"
            out, _ = await asyncio.gather(client.chat("hi"), script(lambda: gateway.answer("x")))
            assert out.text == "x"

    run_async(main())


def test_stream_is_resumed_over_a_restart(gateway: ScriptedGateway, run_async: Run[None]) -> None:
    async def main() -> None:
        async with AsyncClient(gateway.endpoint) as client:
            stream = client.stream("hi")
            peer, submit = await script(gateway.accept)
            gateway.tokens(peer, submit.id, 0, "ab")
            assert (await anext(stream)).text == "ab"
            with gateway.restart() as successor:
                peer, rest = await script(successor.accept)
                assert rest.received == (97, 98)
                successor.tokens(peer, rest.id, 2, "c")
                successor.end(peer, rest.id, 3)
                assert [chunk.text async for chunk in stream] == ["c"]
            assert stream.completion is not None and stream.completion.text == "abc"

    run_async(main())


def test_cancelling_the_task_cancels_the_request(
    gateway: ScriptedGateway, run_async: Run[None]
) -> None:
    async def consume(client: AsyncClient) -> None:
        async for _ in client.chat_stream("hi"):
            pass

    async def main() -> None:
        async with AsyncClient(gateway.endpoint) as client:
            for work in (client.generate("hi"), consume(client)):
                task = asyncio.ensure_future(work)
                _, submit = await script(gateway.accept)
                task.cancel()
                assert (await script(lambda: gateway.expect(Cancel)))[1].id == submit.id
                with pytest.raises(asyncio.CancelledError):
                    await task

    run_async(main())


def test_leaving_the_block_cancels(gateway: ScriptedGateway, run_async: Run[None]) -> None:
    async def main() -> None:
        async with AsyncClient(gateway.endpoint) as client:
            async with client.stream("hi"):
                _, submit = await script(gateway.accept)
            assert (await script(lambda: gateway.expect(Cancel)))[1].id == submit.id

    run_async(main())


def test_timeout_and_lost_connection(tmp_path: Path, run_async: Run[None]) -> None:
    async def main() -> None:
        async with AsyncClient(ipc(tmp_path)) as client:
            with pytest.raises(Timeout):
                await client.generate("hi", timeout=0.05)
        async with AsyncClient(ipc(tmp_path), connect_timeout=0.2) as client:
            with pytest.raises(ConnectionLost):
                async for _ in client.stream("hi"):
                    pass
            with pytest.raises(ConnectionLost):
                await client.status()

    run_async(main())


def test_batch_retries_overloaded(gateway: ScriptedGateway, run_async: Run[None]) -> None:
    def serve() -> None:
        peer, submit = gateway.expect(Submit)
        error = WireError(code="overloaded", message="full", retryable=True, retry_after=0.05)
        gateway.send(peer, Ended(id=submit.id, error=error))
        for _ in range(3):
            peer, submit = gateway.accept()
            assert submit.prompt is not None
            gateway.tokens(peer, submit.id, 0, submit.prompt)
            gateway.end(peer, submit.id, 1)

    async def main() -> None:
        async with AsyncClient(gateway.endpoint) as client:
            batch = client.generate_batch(["a", "b", "c"], max_in_flight=1)
            done, _ = await asyncio.gather(batch, script(serve))
            assert [c.text for c in done] == ["a", "b", "c"]

    run_async(main())


def test_batch_keeps_errors_in_place(gateway: ScriptedGateway, run_async: Run[None]) -> None:
    def serve() -> None:
        peer, submit = gateway.expect(Submit)
        error = WireError(code="overloaded", message="full", retryable=True, retry_after=99.0)
        gateway.send(peer, Ended(id=submit.id, error=error))
        gateway.answer("b")

    async def main() -> None:
        async with AsyncClient(gateway.endpoint) as client:
            batch = client.generate_batch(
                ["a", "b"], max_in_flight=1, return_exceptions=True, timeout=10.0
            )
            (first, second), _ = await asyncio.gather(batch, script(serve))
            assert isinstance(first, Overloaded) and not isinstance(second, Overloaded)

    run_async(main())


def test_one_client_serves_several_loops(gateway: ScriptedGateway, run_async: Run[str]) -> None:
    client = AsyncClient(gateway.endpoint)

    async def main(text: str) -> str:
        out, _ = await asyncio.gather(client.generate("hi"), script(lambda: gateway.answer(text)))
        return out.text

    assert [run_async(main(text)) for text in ("a", "b")] == ["a", "b"]
    run_async(_closed(client))


async def _closed(client: AsyncClient) -> str:
    await client.aclose()
    with pytest.raises(Cancelled):
        await client.generate("hi")
    return ""


def test_a_closed_loop_does_not_harm_the_io_thread(
    gateway: ScriptedGateway, run_async: Run[Any]
) -> None:
    client = AsyncClient(gateway.endpoint)

    async def leave() -> Any:
        return client.stream("hi")

    stream = run_async(leave())
    peer, submit = gateway.accept()
    gateway.tokens(peer, submit.id, 0, "ab")
    stream.close()
    gateway.expect(Cancel)
    run_async(_closed(client))


def test_a_forgotten_client_ends_its_thread(gateway: ScriptedGateway, run_async: Run[None]) -> None:
    client = AsyncClient(gateway.endpoint)
    gateway.expect_hello()
    del client
    gc.collect()
    gateway.expect(Bye)
