"""The one place where errors become HTTP answers in OpenAI's shape."""

import math

import msgspec
from msgspec import Struct

from shared.errors import DiptychError, ErrorCode, ErrorPayload, InvalidRequest, NotFound


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt and output together, do not fit the model's context."""


class ModelNotFound(NotFound):
    """The request names a model that is not served here."""


class RequestFailed(Exception):
    """A request ended with an error of the router or of a worker."""

    def __init__(self, payload: ErrorPayload) -> None:
        super().__init__(payload.message)
        self.payload = payload


class HttpError(Struct, frozen=True):
    """A complete error answer."""

    status: int
    headers: dict[str, str]
    body: bytes


class _Detail(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class _Body(Struct, frozen=True):
    error: _Detail


_STATUS: dict[ErrorCode, tuple[int, str]] = {
    "invalid_request": (400, "invalid_request_error"),
    "unauthorized": (401, "authentication_error"),
    "not_found": (404, "invalid_request_error"),
    "too_large": (413, "invalid_request_error"),
    "overloaded": (429, "rate_limit_error"),
    "deadline_exceeded": (504, "timeout_error"),
    "cancelled": (503, "server_error"),
    "no_worker": (503, "server_error"),
    "worker_lost": (503, "server_error"),
    "transfer_failed": (503, "server_error"),
}
_DEFAULT_RETRY_AFTER = 1.0


def http_error(error: DiptychError | RequestFailed) -> HttpError:
    """Return the answer for an error; 429 and 503 carry ``Retry-After`` in whole seconds."""
    payload = error.payload() if isinstance(error, DiptychError) else error.payload
    status, _ = _status(payload)
    headers: dict[str, str] = {}
    if status in (429, 503):
        headers["retry-after"] = str(math.ceil(payload.retry_after or _DEFAULT_RETRY_AFTER))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return HttpError(status, headers, error_body(error))


def error_body(error: DiptychError | RequestFailed) -> bytes:
    """Return ``{"error": {message, type, param, code}}``, also used inside event streams."""
    payload = error.payload() if isinstance(error, DiptychError) else error.payload
    _, kind = _status(payload)
    return plain_error_body(payload.message, kind, payload.param, _openai_code(error, payload))


def plain_error_body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    """Return an error body from its four parts."""
    return msgspec.json.encode(_Body(_Detail(message, kind, param, code)))


def _status(payload: ErrorPayload) -> tuple[int, str]:
    return _STATUS.get(payload.code, (500, "server_error"))


def _openai_code(error: DiptychError | RequestFailed, payload: ErrorPayload) -> str | None:
    if isinstance(error, ContextLengthExceeded):
        return "context_length_exceeded"
    if isinstance(error, ModelNotFound):
        return "model_not_found"
    if payload.code == "unauthorized":
        return "invalid_api_key"
    return None if payload.code == "invalid_request" else payload.code
