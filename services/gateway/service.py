"""Sockets, tasks and shutdown of the gateway."""

import asyncio
import logging
import time
from contextlib import ExitStack
from pathlib import Path

import zmq

from services.gateway.app import make_app
from services.gateway.auth import Keys
from services.gateway.broker import Broker
from services.gateway.client_link import ClientLink
from services.gateway.config import GatewayConfig
from services.gateway.front import Front, Served
from services.gateway.http_server import HttpServer, open_socket
from services.gateway.sampling_params import TokenLimits
from services.gateway.state import GatewayState
from services.gateway.tokenizer import Tokenizer
from shared.clock import MonotonicClock
from shared.engine.model_files import resolve_model
from shared.errors import BadConfig
from shared.ids import GatewayId, new_incarnation
from shared.messages.gateway_router import FromGateway, ToGateway
from shared.service import ReadyFile, settle_heap
from shared.transport.link import DealerLink
from shared.transport.security import security_for

log = logging.getLogger(__name__)

PATIENCE = 10.0
"""Seconds between two complaints about an absent router."""


class Gateway:
    """All parts of a running gateway.

    Raises:
        BadConfig, ResourceMissing, UnsupportedModel, NotFound: nothing was started.
    """

    def __init__(self, config: GatewayConfig, name: GatewayId, tokenizer: Tokenizer) -> None:
        served = served_model(config, tokenizer)
        client_security = security_for(config.client_endpoint, config.security, "bind")
        router_security = security_for(config.router_endpoint, config.security, "connect")
        incarnation, clock = new_incarnation(), MonotonicClock()
        state = GatewayState(
            name,
            incarnation,
            max_open=config.max_open,
            silence=config.silence,
            max_model_len=served.limits.max_model_len,
            now=clock.now(),
        )
        self.incarnation = incarnation
        self.broker = Broker(state, incarnation, self._send, clock)
        keys = Keys(config.api_keys, config.operators)
        self.front = Front(served, tokenizer, self.broker, keys, clock=clock)
        self._drain_timeout = config.drain_timeout
        with ExitStack() as undo:
            listener = undo.enter_context(open_socket(config.host, config.port))
            context: zmq.Context[zmq.Socket[bytes]] = undo.enter_context(zmq.Context())
            self.clients = ClientLink(
                self.front, incarnation, context, config.client_endpoint, client_security
            )
            undo.callback(self.clients.close)
            self._link: DealerLink[ToGateway, FromGateway] = DealerLink(
                context,
                config.router_endpoint,
                f"{name}#{incarnation}".encode(),
                ToGateway,
                self.broker.receive,
                security=router_security,
            )
            undo.callback(self._link.close)
            self.http = HttpServer(make_app(self.front), listener, 2 * config.max_open + 64)
            self._undo = undo.pop_all()

    async def run(self, ready: ReadyFile, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set, then drain."""
        async with asyncio.TaskGroup() as tasks:
            ticker = tasks.create_task(self._tick())
            try:
                await self.http.start()
                await self._announce(ready, stop)
                await stop.wait()
                ready.remove()
                await self._drain()
            finally:
                ready.remove()
                ticker.cancel()

    async def close(self) -> None:
        """Stop serving, close sockets, end the schema checker. Idempotent."""
        await self.http.stop()
        self._undo.close()
        await self.front.grammar.close()

    async def _announce(self, ready: ReadyFile, stop: asyncio.Event) -> None:
        """Write the ready file once the router knows this gateway."""
        waiting = asyncio.create_task(self.broker.welcomed())
        stopping = asyncio.create_task(stop.wait())
        try:
            while not waiting.done() and not stopping.done():
                await asyncio.wait(
                    (waiting, stopping), timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED
                )
                if not waiting.done() and not stopping.done():
                    log.warning("still waiting for the router at %s", self._link.endpoint)
        finally:
            waiting.cancel()
            stopping.cancel()
        if waiting.done() and not stop.is_set():
            ready.write(self.incarnation, url=self.http.url)
            log.info("ready on %s and %s", self.http.url, self.clients.endpoint)

    async def _drain(self) -> None:
        num_open = self.broker.state.num_open
        log.info("draining %d requests, at most %g s", num_open, self._drain_timeout)
        self.broker.state.draining = True
        self.clients.say_goodbye()
        await self.broker.drain(self._drain_timeout)
        await self.http.stop()

    async def _tick(self) -> None:
        while True:
            self.broker.tick()
            await self.broker.rest(self.clients.tick())

    def _send(self, message: FromGateway) -> bool:
        return self._link.send(message)


async def serve(config: GatewayConfig, name: GatewayId, stop: asyncio.Event) -> None:
    """Run one gateway process until ``stop`` is set.

    Raises:
        BadConfig, ResourceMissing, UnsupportedModel, NotFound: nothing was started.
    """
    model_dir = await asyncio.to_thread(resolve_model, config.model_path)
    gateway = Gateway(config, name, Tokenizer(model_dir))
    settle_heap()
    try:
        await gateway.run(ReadyFile(config.runtime_dir, name), stop)
    finally:
        await gateway.close()


def served_model(config: GatewayConfig, tokenizer: Tokenizer) -> Served:
    """Return what is served. Raises ``BadConfig`` for a context longer than the model's."""
    max_model_len = config.max_model_len or tokenizer.max_model_len
    if max_model_len > tokenizer.max_model_len:
        raise BadConfig(
            f"`model.max_model_len: {max_model_len}` is more than the model's "
            f"{tokenizer.max_model_len} positions"
        )
    return Served(
        model=config.served_name or Path(config.model_path).name,
        created=int(time.time()),
        limits=TokenLimits(
            max_model_len=max_model_len,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
        ),
        max_body=config.max_body,
        request_timeout=config.request_timeout,
    )
