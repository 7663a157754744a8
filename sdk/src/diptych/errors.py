"""What a call can raise. Every error says in one sentence what happened and what to do."""

from diptych.wire import WireError


class DiptychError(Exception):
    """Base of all errors of this package.

    ``code`` is the stable name of the cause, ``retryable`` tells whether the same call may
    succeed later, ``retry_after`` (seconds) when, ``param`` names the offending argument.
    """

    code: str = "internal"
    retryable: bool = False

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class InvalidRequest(DiptychError):
    """The arguments must change; ``param`` names the one."""

    code = "invalid_request"


class TooLarge(InvalidRequest):
    """The request is over the size limit of a message."""

    code = "too_large"


class Unauthorized(DiptychError):
    """Missing or unknown ``api_key``."""

    code = "unauthorized"


class NotFound(DiptychError):
    """Unknown model or path."""

    code = "not_found"


class Overloaded(DiptychError):
    """The system or this client is full; try again after ``retry_after`` seconds."""

    code = "overloaded"
    retryable = True


class Timeout(DiptychError):
    """The call's ``timeout`` passed."""

    code = "deadline_exceeded"
    retryable = True


class Cancelled(DiptychError):
    """The request was cancelled, by the gateway or by closing this client."""

    code = "cancelled"


class ConnectionLost(DiptychError):
    """No gateway answers, or none stays long enough to make progress."""

    code = "connection_lost"
    retryable = True


class IncompatibleGateway(DiptychError):
    """Gateway and client speak different versions; install the one that fits."""

    code = "incompatible_peer"


class ServerError(DiptychError):
    """The system failed in a way the caller did not cause; see ``code`` and ``retryable``."""


_BY_CODE: dict[str, type[DiptychError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        TooLarge,
        Unauthorized,
        NotFound,
        Overloaded,
        Timeout,
        Cancelled,
        ConnectionLost,
        IncompatibleGateway,
    )
}


def error_from(error: WireError) -> DiptychError:
    """Return the exception for an error of the wire; an unknown code gives ``ServerError``."""
    kind = _BY_CODE.get(error.code, ServerError)
    out = kind(error.message, param=error.param, retry_after=error.retry_after)
    out.code = error.code
    out.retryable = error.retryable or kind.retryable
    return out
