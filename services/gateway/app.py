"""HTTP routes and the one place where exceptions become answers."""

import logging
from collections.abc import Awaitable, Callable

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.body import ClientGone
from services.gateway.chat import create_chat_completion
from services.gateway.completions import create_completion
from services.gateway.errors import RequestFailed, http_error, plain_error_body
from services.gateway.fleet_metrics import fleet_text
from services.gateway.front import Front
from services.gateway.health import Readiness
from services.gateway.models import model_list, served_model
from shared.errors import DiptychError, NoWorker
from shared.messages.fleet import FleetStatus

log = logging.getLogger(__name__)

FLEET_DEADLINE = 1.0
"""Seconds `/metrics` waits for the router."""
_CLIENT_CLOSED = 499

Endpoint = Callable[[Front, Request], Awaitable[Response]]


def make_app(front: Front) -> Starlette:
    """Return the ASGI application."""
    readiness = Readiness(front)

    async def livez(_: Request) -> Response:
        return _json({"status": "alive"})

    async def readyz(_: Request) -> Response:
        health = await readiness.check()
        answer = _json({"status": health.status}, 200 if health.ready else 503)
        if not health.ready:
            answer.headers["retry-after"] = "1"
        return answer

    async def metrics(_: Request) -> Response:
        front.metrics.open.set(front.broker.state.num_open)
        body = front.metrics.text() + fleet_text(await _fleet(front))
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(request: Request) -> Response:
        front.keys.tenant_of_header(request.headers.get("authorization"))
        return _json(model_list(front))

    async def model(request: Request) -> Response:
        front.keys.tenant_of_header(request.headers.get("authorization"))
        front.check_model(request.path_params["model"])
        return _json(served_model(front))

    routes = [
        Route("/livez", _guarded(front, livez)),
        Route("/readyz", _guarded(front, readyz)),
        Route("/metrics", _guarded(front, metrics)),
        Route("/v1/models", _guarded(front, models)),
        Route("/v1/models/{model:path}", _guarded(front, model)),
        Route("/v1/completions", _bound(front, create_completion), methods=["POST"]),
        Route("/v1/chat/completions", _bound(front, create_chat_completion), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_exception})


def _bound(front: Front, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def call(request: Request) -> Response:
        return await endpoint(front, request)

    return _guarded(front, call)


def _guarded(
    front: Front, endpoint: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """Answer errors in OpenAI's shape; only bugs get past this, as 500 with a log entry."""

    async def call(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientGone:
            return Response(status_code=_CLIENT_CLOSED)
        except (DiptychError, RequestFailed) as error:
            answer = http_error(error)
            response = Response(
                answer.body, answer.status, answer.headers, media_type="application/json"
            )
        except Exception:
            log.exception("%s %s failed", request.method, request.url.path)
            body = plain_error_body("internal error", "server_error", None, "internal")
            response = Response(body, 500, media_type="application/json")
        front.metrics.refused.labels(str(response.status_code)).inc()
        if response.status_code == 413:
            response.headers["connection"] = "close"
        return response

    return call


async def _http_exception(request: Request, error: Exception) -> Response:
    """Answer unknown paths and wrong methods."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    messages = {404: "there is no such path", 405: "this method is not allowed here"}
    message = f"{messages.get(status, 'bad request')}: {request.method} {request.url.path}"
    body = plain_error_body(message, "invalid_request_error", None, None)
    headers = error.headers if isinstance(error, HTTPException) else None
    return Response(body, status, headers, media_type="application/json")


async def _fleet(front: Front) -> FleetStatus | None:
    try:
        return await front.broker.fleet(FLEET_DEADLINE)
    except NoWorker as error:
        log.warning("metrics without the fleet: %s", error.message)
        return None


def _json(answer: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")
