"""The error tree: a stable code, whether a retry can help, a sentence to act on."""

from typing import ClassVar, Literal

from msgspec import Struct

ErrorCode = Literal[
    "invalid_request",
    "unauthorized",
    "not_found",
    "too_large",
    "overloaded",
    "deadline_exceeded",
    "cancelled",
    "no_worker",
    "worker_lost",
    "transfer_failed",
    "incompatible_peer",
    "unsupported_model",
    "bad_config",
    "resource_missing",
    "numerical",
    "internal",
]


class ErrorPayload(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error on the wire.

    ``param`` names the offending request field, ``retry_after`` is in seconds.
    """

    code: ErrorCode
    message: str
    retryable: bool = False
    param: str | None = None
    retry_after: float | None = None


class DiptychError(Exception):
    """Base of every error Diptych raises on purpose."""

    code: ClassVar[ErrorCode] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def payload(self) -> ErrorPayload:
        """Return the wire form."""
        return ErrorPayload(
            code=self.code,
            message=self.message,
            retryable=self.retryable,
            param=self.param,
            retry_after=self.retry_after,
        )


class InvalidRequest(DiptychError):
    """The caller must change the request; ``param`` names the field."""

    code = "invalid_request"


class Unauthorized(DiptychError):
    """Missing or unknown key."""

    code = "unauthorized"


class NotFound(DiptychError):
    """Unknown model or path."""

    code = "not_found"


class TooLarge(DiptychError):
    """Body or frame over its cap."""

    code = "too_large"


class Overloaded(DiptychError):
    """A bounded queue is full; try again after ``retry_after`` seconds."""

    code = "overloaded"
    retryable = True


class DeadlineExceeded(DiptychError):
    """The request's time is up."""

    code = "deadline_exceeded"
    retryable = True


class NoWorker(DiptychError):
    """No ready worker of the needed role."""

    code = "no_worker"
    retryable = True


class WorkerLost(DiptychError):
    """A worker died or hung and the work could not be placed elsewhere."""

    code = "worker_lost"
    retryable = True


class TransferFailed(DiptychError):
    """KV did not arrive or did not verify."""

    code = "transfer_failed"
    retryable = True


class NoPeerAccess(TransferFailed):
    """One GPU cannot reach the other's memory."""


class IncompatiblePeer(DiptychError):
    """Two processes disagree on model, layout or wire version; the sentence lists the fields."""

    code = "incompatible_peer"


class UnsupportedModel(DiptychError):
    """The model failed a load-time check; the sentence says which."""

    code = "unsupported_model"


class BadConfig(DiptychError):
    """The deployment file is wrong; the sentence gives key path and allowed values."""

    code = "bad_config"


class ResourceMissing(DiptychError):
    """Port, memory, file or shared memory is not available."""

    code = "resource_missing"


class DeviceLost(DiptychError):
    """A GPU failed or hangs: the process cannot go on with it, another one may."""


class NumericalError(DiptychError):
    """NaN or Inf in a request's logits."""

    code = "numerical"
