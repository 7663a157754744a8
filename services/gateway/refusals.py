"""Errors of the gateway's own making."""

from shared.errors import ErrorPayload


def shutting_down() -> ErrorPayload:
    """The error of requests that come during a drain."""
    return ErrorPayload(
        code="no_worker",
        message="the gateway is shutting down",
        retryable=True,
        retry_after=1.0,
    )


def too_many(num_open: int, more: int, limit: int) -> ErrorPayload:
    """The error of requests beyond ``gateway.max_open``."""
    return ErrorPayload(
        code="overloaded",
        message=f"{num_open} requests are open and {more} more would exceed "
        f"the limit of {limit} (gateway.max_open)",
        retryable=True,
        retry_after=1.0,
    )


def no_router() -> ErrorPayload:
    """The error of requests that waited for the router in vain."""
    return ErrorPayload(
        code="no_worker",
        message="the router cannot be reached",
        retryable=True,
        retry_after=2.0,
    )


def too_late() -> ErrorPayload:
    """The error of requests whose time is up."""
    return ErrorPayload(
        code="deadline_exceeded", message="the request's time is up", retryable=True
    )
