"""What the gateway's state machine takes and what it answers."""

from msgspec import Struct

from shared.errors import ErrorPayload
from shared.ids import RequestId
from shared.messages.gateway_router import (
    FleetReply,
    FromGateway,
    RequestTimeline,
    ToGateway,
    TokenItem,
)
from shared.messages.request import FinishReason, Request, TokenLogprob


class Submit(Struct, frozen=True):
    """Run ``request`` (``output_ids`` may hold what the client has) until ``deadline``."""

    request: Request
    deadline: float


class Abandon(Struct, frozen=True):
    """Nobody listens any more: cancel and forget. No ``Finished`` follows."""

    request_id: RequestId


class Stop(Struct, frozen=True):
    """A stop string was found: cancel, then ``Finished`` with what the router tells of it."""

    request_id: RequestId


class FromRouter(Struct, frozen=True):
    """A message of the router."""

    message: ToGateway


class Tick(Struct, frozen=True):
    """Time went by; wanted at ``GatewayState.wake_at``."""


class Unsent(Struct, frozen=True):
    """The link did not take a ``Generate``: too many messages wait for the router."""

    wire_id: RequestId


class FailAll(Struct, frozen=True):
    """End every open request with this error (the drain took too long)."""

    error: ErrorPayload


Event = Submit | Abandon | Stop | FromRouter | Tick | Unsent | FailAll


class Send(Struct, frozen=True):
    """Send to the router."""

    message: FromGateway


class NewTokens(Struct, frozen=True):
    """The next output tokens of a request, in order, each delivered once."""

    request_id: RequestId
    items: list[TokenItem]


class NewPromptLogprobs(Struct, frozen=True):
    """Log probabilities of prompt tokens 1..n-1, delivered once."""

    request_id: RequestId
    items: tuple[TokenLogprob, ...]


class Finished(Struct, frozen=True, kw_only=True):
    """The one end of a request: ``reason`` or ``error`` is set."""

    request_id: RequestId
    reason: FinishReason | None = None
    error: ErrorPayload | None = None
    num_cached_tokens: int = 0
    timeline: RequestTimeline | None = None


class FleetKnown(Struct, frozen=True):
    """An answer to a fleet query."""

    reply: FleetReply


Effect = Send | NewTokens | NewPromptLogprobs | Finished | FleetKnown
