"""A whole gateway on real sockets, before a router that follows a script."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq

from services.gateway.config import GatewayConfig, gateway_config
from services.gateway.service import Gateway
from shared.config import (
    Deployment,
    GatewaySection,
    ModelSection,
    RouterSection,
    WorkerSection,
    WorkersSection,
)
from shared.errors import ErrorPayload
from shared.ids import GatewayId, Incarnation, RequestId, new_incarnation
from shared.messages.fleet import (
    FleetStatus,
    RouterCounters,
    WorkerCounters,
    WorkerLoad,
    WorkerStatus,
)
from shared.messages.gateway_router import (
    CancelRequest,
    Drain,
    Ended,
    FleetQuery,
    FleetReply,
    FromGateway,
    GatewayHello,
    GatewayPing,
    Generate,
    PromptLogprobs,
    RequestTimeline,
    RouterPong,
    RouterWelcome,
    ToGateway,
    TokenItem,
    Tokens,
)
from shared.messages.request import PhaseTimes, Request, TokenLogprob
from shared.service import ReadyFile
from shared.transport.link import RouterLink
from tests.transport.harness import short_directory
from tests.unit.gateway_model import NAME, load

TEXT = "The quick brown fox 🦙 jumps over the lazy dog. Größe: 4 €. End of line, again and again. "
MAX_MODEL_LEN = 256


def expected(tokens: int) -> str:
    """Return the text of the script's first tokens."""
    ids = load().encode(TEXT)
    return load().decode([ids[i % len(ids)] for i in range(tokens)])


class Running:
    """One request at the scripted router."""

    def __init__(self, peer: bytes, request: Request) -> None:
        self.peer = peer
        self.request = request
        self.next = len(request.output_ids)


class ScriptedRouter:
    """Answers every request with ``script``, one token per request and turn of the loop.

    ``end_after`` ends outputs with the end token after so many tokens. ``held`` stops output
    until ``release``. ``refusal`` answers new requests with an error.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> None:
        self.context, self.endpoint = context, endpoint
        self.script = list(load().encode(TEXT))
        self.incarnation = new_incarnation()
        self.requests: list[Request] = []
        self.cancelled: list[RequestId] = []
        self.running: dict[RequestId, Running] = {}
        self.refusal: ErrorPayload | None = None
        self.end_after: int | None = None
        self.cached = 3
        self.allowed: int | None = None
        self.silent = False
        self.changed = asyncio.Event()
        self._scheduled = False
        self._open()

    def _open(self) -> None:
        self.link: RouterLink[FromGateway, ToGateway] = RouterLink(
            self.context, self.endpoint, FromGateway, self._on_message
        )

    def restart(self) -> None:
        """Die without a word and come back knowing nothing."""
        self.link.close()
        self.running.clear()
        self.incarnation = Incarnation(self.incarnation + 1)
        self._open()

    def close(self) -> None:
        self.link.close()

    def hold(self, tokens: int = 0) -> None:
        """Let every request have at most so many tokens."""
        self.allowed = tokens

    def release(self) -> None:
        self.allowed = None
        self._schedule()

    async def until(self, condition: Callable[["ScriptedRouter"], bool]) -> None:
        """Wait until something the gateway did makes ``condition`` true."""
        while not condition(self):
            self.changed.clear()
            await self.changed.wait()

    def _on_message(self, peer: bytes, message: FromGateway) -> None:
        if self.silent:
            return
        if isinstance(message, GatewayHello):
            self.link.send(peer, RouterWelcome(incarnation=self.incarnation))
        elif isinstance(message, GatewayPing):
            self.link.send(peer, RouterPong(incarnation=self.incarnation))
        elif isinstance(message, Generate):
            self._generate(peer, message.request)
        elif isinstance(message, CancelRequest):
            self.cancelled.append(message.request_id)
            if self.running.pop(message.request_id, None) is not None:
                self._end(peer, message.request_id)
        elif isinstance(message, FleetQuery):
            self.link.send(peer, FleetReply(query=message.query, status=fleet_status()))
        else:
            assert isinstance(message, Drain)
        self.changed.set()

    def _generate(self, peer: bytes, request: Request) -> None:
        self.requests.append(request)
        if self.refusal is not None:
            self.link.send(peer, Ended(request_id=request.request_id, error=self.refusal))
            return
        self.running[request.request_id] = Running(peer, request)
        if request.sampling.prompt_logprobs is not None:
            items = tuple(self._score(request, t) for t in request.prompt_ids[1:])
            self.link.send(peer, PromptLogprobs(request_id=request.request_id, items=items))
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        batches: dict[bytes, list[TokenItem]] = {}
        over: list[tuple[Running, Any]] = []
        for running in list(self.running.values()):
            if self.allowed is not None and running.next >= self.allowed:
                continue
            item, reason = self._next(running)
            batches.setdefault(running.peer, []).append(item)
            if reason is not None:
                over.append((running, reason))
        for peer, items in batches.items():
            self.link.send(peer, Tokens(items=tuple(items)))
        for running, reason in over:
            self.running.pop(running.request.request_id, None)
            self._end(running.peer, running.request.request_id, reason, running)
        if batches and self.running:
            self._schedule()

    def _next(self, running: Running) -> tuple[TokenItem, str | None]:
        request, index = running.request, running.next
        token = self.script[index % len(self.script)]
        reason = None
        ends = request.sampling.stop_token_ids
        if ends and self.end_after is not None and index + 1 >= self.end_after:
            token, reason = ends[0], "stop"
        if index + 1 >= request.sampling.max_tokens:
            reason = reason or "length"
        running.next += 1
        score = None if request.sampling.logprobs is None else self._score(request, token)
        return TokenItem(request.request_id, index, token, score), reason

    def _score(self, request: Request, token: int) -> TokenLogprob:
        best = max(request.sampling.logprobs or 0, request.sampling.prompt_logprobs or 0)
        return TokenLogprob(-0.5, tuple((token + i, -0.5 - i) for i in range(best)))

    def _end(
        self, peer: bytes, name: RequestId, reason: Any = None, running: Running | None = None
    ) -> None:
        now = asyncio.get_running_loop().time()
        times = PhaseTimes(accepted=now, started=now, prefilled=now)
        message = Ended(
            request_id=name,
            reason=reason,
            num_tokens=0 if running is None else running.next,
            num_cached_tokens=self.cached,
            timeline=RequestTimeline(received=now, dispatched=now, prefill=times, split=True),
        )
        self.link.send(peer, message)


def fleet_status() -> FleetStatus:
    worker = WorkerStatus(
        worker="prefill-0",  # type: ignore[arg-type]
        role="prefill",
        health="ready",
        incarnation=Incarnation(5),
        pid=1,
        age=0.1,
        load=WorkerLoad(running=2, blocks_total=10, blocks_free=10),
        counters=WorkerCounters(steps=7),
    )
    return FleetStatus(
        incarnation=Incarnation(9),
        uptime=1.0,
        queued=0,
        open_requests=0,
        draining=False,
        workers=(worker,),
        counters=RouterCounters(accepted=4, decisions={"split": 3}),
    )


class Rig:
    """A gateway that can be replaced, its router, and ``client``, which speaks HTTP to it."""

    def __init__(self, config: GatewayConfig, router: ScriptedRouter) -> None:
        self.config = config
        self.router = router
        self.ready = config.runtime_dir / "gateway.ready"

    async def start(self) -> None:
        """Start a gateway and wait until the router knows it."""
        self.gateway = Gateway(self.config, GatewayId("gateway"), load())
        self.url = self.gateway.http.url
        self.stop = asyncio.Event()
        self.client = httpx.AsyncClient(base_url=self.url, timeout=10.0)
        self._task = asyncio.create_task(
            self.gateway.run(ReadyFile(self.config.runtime_dir, "gateway"), self.stop)
        )
        await self.gateway.broker.welcomed()

    async def drain(self) -> None:
        """Stop as SIGTERM does; nothing may stay open."""
        self.stop.set()
        await self.client.aclose()
        await self._task
        self.gateway.broker.state.check()
        assert self.gateway.broker.state.num_open == 0
        assert not self.gateway.broker._listeners

    async def close(self) -> None:
        """Stop at once, without a word to anybody."""
        self._task.cancel()
        await asyncio.wait((self._task,))
        await self.client.aclose()
        await self.gateway.close()

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        return await self.client.post(f"/v1/{path}", json=fields)

    async def complete(self, **fields: Any) -> dict[str, Any]:
        """Return the document of a completion that must succeed."""
        answer = await self.post("completions", **({"prompt": "Once upon a time"} | fields))
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def stream(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the chunks of a stream that must end with [DONE]."""
        fields = {"stream": True} | fields
        async with self.client.stream("POST", f"/v1/{path}", json=fields) as answer:
            assert answer.status_code == 200, await answer.aread()
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = [line async for line in answer.aiter_lines() if line]
        assert events[-1] == "data: [DONE]"
        return [msgspec.json.decode(event.removeprefix("data: ")) for event in events[:-1]]

    async def idle(self) -> None:
        """Wait until neither gateway nor router has an open request."""
        await self.router.until(lambda router: not router.running)
        assert self.gateway.broker.state.num_open == 0


def configuration(directory: Path, **section: Any) -> GatewayConfig:
    deployment = Deployment(
        name="rig",
        deployment_type="split",
        model=ModelSection(path=NAME, max_model_len=MAX_MODEL_LEN),
        workers=WorkersSection(prefill=WorkerSection(), decode=WorkerSection()),
        router=RouterSection(drain_timeout=5.0),  # type: ignore[arg-type]
        gateway=GatewaySection(**({"http": "127.0.0.1:0"} | section)),
        runtime_dir=str(directory),
    )
    return gateway_config(deployment)


@asynccontextmanager
async def rig(**section: Any) -> AsyncIterator[Rig]:
    """Run a gateway and its scripted router; leaving checks that nothing stays open."""
    directory = short_directory()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    config = configuration(directory, **section)
    router = ScriptedRouter(context, config.router_endpoint)
    running = Rig(config, router)
    try:
        await running.start()
        yield running
        await running.drain()
    finally:
        await running.close()
        router.close()
        context.term()
        shutil.rmtree(directory)
