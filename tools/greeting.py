"""The first request to a fresh deployment: the one whose ``curl`` command the user is shown."""

import json
import shlex
import time
from collections.abc import Mapping

import httpx
import msgspec

from shared.config import Deployment
from shared.errors import ResourceMissing

_REQUEST_TIMEOUT = 60.0
_POLL = 0.1


def greet(url: str, deployment: Deployment, timeout: float) -> str:
    """Wait until the gateway reports ready, send one chat request, return its curl command.

    Raises:
        ResourceMissing: the gateway does not become ready in ``timeout`` seconds, or the
            request fails.
    """
    keys = deployment.gateway.api_keys
    headers = {"Authorization": f"Bearer {next(iter(keys))}"} if keys else {}
    with httpx.Client(
        base_url=url, headers=headers, timeout=_REQUEST_TIMEOUT, trust_env=False
    ) as client:
        _wait_ready(client, timeout)
        model = _model(client)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 32,
            "temperature": 0,
        }
        try:
            answer = client.post("/v1/chat/completions", json=body)
        except httpx.HTTPError as error:
            raise ResourceMissing(f"the first request failed: {error!r}") from error
        if answer.status_code != 200:
            raise ResourceMissing(f"the first request failed: {answer.text[:500]}")
    return curl(f"{url}/v1/chat/completions", body, with_key=bool(keys))


def curl(url: str, body: Mapping[str, object], *, with_key: bool) -> str:
    """Return a shell command that sends ``body`` as JSON, one field per line."""
    lines = [f"curl {url}", "-H 'Content-Type: application/json'"]
    if with_key:
        lines.append('-H "Authorization: Bearer $DIPTYCH_API_KEY"')
    fields = ",\n    ".join(f"{json.dumps(name)}: {json.dumps(body[name])}" for name in body)
    lines.append(f"-d {shlex.quote(f'{{{fields}}}')}")
    return " \\\n  ".join(lines)


def _wait_ready(client: httpx.Client, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    problem = "no answer"
    while True:
        try:
            answer = client.get("/readyz")
        except httpx.HTTPError as error:
            problem = repr(error)
        else:
            if answer.status_code == 200:
                return
            problem = answer.text[:500]
        if time.monotonic() >= deadline:
            raise ResourceMissing(
                f"no request came through all services within {timeout:.0f} s "
                f"(`router.hung_after`; more for a busy machine); /readyz says: {problem}"
            )
        time.sleep(_POLL)


def _model(client: httpx.Client) -> str:
    try:
        listing = client.get("/v1/models")
        listing.raise_for_status()
        return msgspec.json.decode(listing.content, type=_Models).data[0].id
    except (httpx.HTTPError, msgspec.MsgspecError, IndexError) as error:
        raise ResourceMissing(f"GET /v1/models does not name a model: {error!r}") from error


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]
