"""Orders of an operator to a worker: from the client through gateway and router, and back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import diptych
from services.gateway.service import Gateway
from services.router.config import RouterConfig
from shared.ids import GatewayId
from shared.messages.router_worker import Prefill, Run
from shared.service import ReadyFile
from tests.conftest import RunAsync
from tests.transport.gateway_rig import configuration
from tests.transport.harness import Context
from tests.transport.router_rig import Rig, in_process
from tests.unit.gateway_model import load
from tests.unit.gateway_model import tokenizer as tokenizer

pytestmark = pytest.mark.usefixtures("tokenizer")


@asynccontextmanager
async def fleet(
    context: Context, directory: Path, **gateway: Any
) -> AsyncIterator[tuple[Rig, str]]:
    """Run gateway and router around scripted workers; the string is the SDK's endpoint."""
    async with in_process(context, directory, RouterConfig(worker_timeout=60.0)) as (rig, _):
        config = configuration(directory, **gateway)
        running = Gateway(config, GatewayId("gateway"), load())
        stop = asyncio.Event()
        task = asyncio.create_task(running.run(ReadyFile(directory, "gateway"), stop))
        try:
            await running.broker.welcomed()
            yield rig, config.client_endpoint
        finally:
            stop.set()
            await task
            await running.close()


def health(status: dict[str, Any], name: str) -> tuple[str, str, bool]:
    (worker,) = [w for w in status["workers"] if w["worker"] == name]
    return worker["role"], worker["health"], worker["drained"]


async def until(client: diptych.AsyncClient, name: str, wanted: tuple[str, str, bool]) -> None:
    while health(await client.status(), name) != wanted:
        pass


def test_a_worker_is_emptied_and_serves_again_when_told(
    run_async: RunAsync, context: Context, directory: Path
) -> None:
    async def main() -> None:
        async with fleet(context, directory) as (rig, endpoint):
            decodes = [rig.worker("decode-0"), rig.worker("decode-1")]
            prefill = rig.worker("prefill-0")
            await rig.joined(*decodes, prefill)
            async with diptych.AsyncClient(endpoint) as client:
                for worker in decodes:
                    worker.hold = 2
                streams = [client.stream([5, 6, 7], max_tokens=9) for _ in range(2)]
                for stream in streams:
                    await anext(stream)
                status = await client.drain("decode-0")
                assert health(status, "decode-0") == ("decode", "draining", False)
                third = client.stream([5, 6, 7], max_tokens=9)
                await anext(third)
                runs = [[m for m in w.received if isinstance(m, Run)] for w in decodes]
                assert [len(each) for each in runs] == [1, 2]
                for worker in decodes:
                    worker.release()
                for stream in (*streams, third):
                    async for _ in stream:
                        pass
                await until(client, "decode-0", ("decode", "draining", True))
                await client.drain("decode-0", role="prefill")
                await until(client, "decode-0", ("prefill", "ready", False))
                await client.drain("prefill-0")
                await client.generate([5] * 100, max_tokens=3)
                assert [m for m in decodes[0].received if isinstance(m, Prefill)]
                with pytest.raises(diptych.NotFound, match="decode-9"):
                    await client.drain("decode-9")

    run_async(main())


def test_only_operators_see_and_order_the_fleet(
    run_async: RunAsync, context: Context, directory: Path
) -> None:
    """Any tenant's key showed what the others do, and would have emptied workers."""

    async def main() -> None:
        keys = {"k1": "red", "k2": "blue"}
        section = {"api_keys": keys, "operators": ("blue",)}
        async with fleet(context, directory, **section) as (rig, endpoint):
            await rig.joined(rig.worker("decode-0"))
            async with diptych.AsyncClient(endpoint, api_key="k1") as client:
                with pytest.raises(diptych.Unauthorized, match=r"gateway\.operators"):
                    await client.status()
                with pytest.raises(diptych.Unauthorized):
                    await client.drain("decode-0")
                assert (await client.generate([5], max_tokens=2)).token_ids
            async with diptych.AsyncClient(endpoint, api_key="k2") as client:
                assert health(await client.status(), "decode-0")[1] == "ready"
                assert health(await client.drain("decode-0"), "decode-0")[1] == "draining"

    run_async(main())
