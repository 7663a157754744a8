"""Runs the ASGI application with uvicorn inside the service's own loop."""

import asyncio
import contextlib
import errno
import socket

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.errors import plain_error_body
from services.gateway.http_protocol import BoundedHttpProtocol
from shared.errors import BadConfig, ResourceMissing

KEEP_ALIVE = 65.0
"""Seconds an idle connection stays open: longer than the 60 s of common proxies."""
DATE_INTERVAL = 1.0
"""Seconds between two looks at the clock for the `Date` header."""
_CLOSE_TIMEOUT = 5
_BACKLOG = 1024


def open_socket(host: str, port: int) -> socket.socket:
    """Listen on ``host:port``; port 0 picks a free one.

    Raises:
        ResourceMissing: the port is in use or may not be taken.
        BadConfig: the host has no address here.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise BadConfig(f"`gateway.http`: {host!r} is not an address here: {error}") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ResourceMissing(
                f"port {port} on {host} is in use by another process: stop it, or choose "
                "another `gateway.http`"
            ) from error
        raise ResourceMissing(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


class HttpServer:
    """A uvicorn server without its own signal handling, logging set-up or loop.

    Beyond ``max_connections`` requests get 503, except `/livez`: a crowd is no reason to be
    taken for dead.
    """

    def __init__(self, app: ASGIApp, listener: socket.socket, max_connections: int) -> None:
        self._app = app
        self._max_connections = max_connections
        config = uvicorn.Config(
            self._admit,
            interface="asgi3",
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=int(KEEP_ALIVE),
            timeout_graceful_shutdown=_CLOSE_TIMEOUT,
        )
        config.load()
        self._listener = listener
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._stopping = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def num_connections(self) -> int:
        """Open connections, idle ones included."""
        return len(self._server.server_state.connections)

    async def start(self) -> None:
        """Accept connections."""
        await self._server.startup(sockets=[self._listener])
        self._loop_task = asyncio.create_task(self._keep_time())

    async def stop(self) -> None:
        """Close the listening socket, let answers under way end, close all. Idempotent."""
        self._server.should_exit = True
        self._stopping.set()
        loop_task, self._loop_task = self._loop_task, None
        if loop_task is not None:
            await loop_task
            await self._server.shutdown(sockets=[self._listener])

    async def _keep_time(self) -> None:
        """Do what uvicorn's main loop does, but once a second instead of ten times."""
        while not await self._server.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_INTERVAL):
                    await self._stopping.wait()

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        crowd = self.num_connections
        if crowd <= self._max_connections or scope.get("path") == "/livez":
            await self._app(scope, receive, send)
            return
        message = f"{crowd} connections are open, {self._max_connections} are served"
        body = plain_error_body(message, "server_error", None, "overloaded")
        headers = {"retry-after": "1", "connection": "close"}
        await Response(body, 503, headers, media_type="application/json")(scope, receive, send)
