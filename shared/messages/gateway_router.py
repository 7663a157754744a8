"""Gateway (DEALER) <-> router (ROUTER)."""

from msgspec import Struct

from shared.errors import ErrorPayload
from shared.ids import GatewayId, Incarnation, RequestId, WorkerId
from shared.messages.fleet import FleetStatus, Role
from shared.messages.request import FinishReason, PhaseTimes, Request, TokenLogprob


class GatewayHello(Struct, tag="hello", frozen=True, kw_only=True):
    """First message of a gateway, repeated after every reconnect."""

    gateway: GatewayId
    incarnation: Incarnation
    wire_version: int


class Generate(Struct, tag="generate", frozen=True, kw_only=True):
    """Run a request. A ``request_id`` that is already open is refused as a duplicate."""

    request: Request


class CancelRequest(Struct, tag="cancel", frozen=True, kw_only=True):
    """The client left or a stop string was found; answered by ``Ended`` with no error."""

    request_id: RequestId


class WorkerOrder(Struct, frozen=True, kw_only=True):
    """Empty a worker; with ``role``, which may be its own, it serves again afterwards."""

    worker: WorkerId
    role: Role | None = None


class FleetQuery(Struct, tag="fleet?", frozen=True, kw_only=True, omit_defaults=True):
    """Ask for ``FleetReply``, and give an order first."""

    query: int
    order: WorkerOrder | None = None


class Drain(Struct, tag="drain", frozen=True, kw_only=True):
    """Stop admitting new requests; running ones finish."""


class GatewayPing(Struct, tag="ping", frozen=True, kw_only=True):
    """Heartbeat; answered by ``RouterPong``."""


FromGateway = GatewayHello | Generate | CancelRequest | FleetQuery | Drain | GatewayPing


class RouterWelcome(Struct, tag="welcome", frozen=True, kw_only=True):
    """Answer to ``GatewayHello``. A new incarnation makes the gateway re-submit its requests."""

    incarnation: Incarnation


class RouterPong(Struct, tag="pong", frozen=True, kw_only=True):
    """Answer to ``GatewayPing``."""

    incarnation: Incarnation


class TokenItem(Struct, frozen=True, array_like=True, gc=False):
    """One output token; ``index`` counts from 0 over the whole output, resumed part included."""

    request_id: RequestId
    index: int
    token: int
    logprob: TokenLogprob | None = None


class Tokens(Struct, tag="tokens", frozen=True, kw_only=True):
    """All tokens of one scheduler tick for one gateway, in order per request."""

    items: tuple[TokenItem, ...]


class PromptLogprobs(Struct, tag="plp", frozen=True, kw_only=True):
    """Log probabilities of prompt tokens 1..n-1 (the first has none)."""

    request_id: RequestId
    items: tuple[TokenLogprob, ...]


class RequestTimeline(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a request spent its time; moments are ``CLOCK_MONOTONIC`` of the named hosts."""

    received: float
    dispatched: float | None = None
    split: bool = False
    reason: str = ""
    retries: int = 0
    prefill_worker: str | None = None
    decode_worker: str | None = None
    prefill: PhaseTimes | None = None
    decode: PhaseTimes | None = None


class Ended(Struct, tag="ended", frozen=True, kw_only=True, omit_defaults=True):
    """The one terminal message of a request: finished, cancelled (neither field) or failed."""

    request_id: RequestId
    reason: FinishReason | None = None
    error: ErrorPayload | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    timeline: RequestTimeline | None = None


class FleetReply(Struct, tag="fleet", frozen=True, kw_only=True, omit_defaults=True):
    """Answer to ``FleetQuery``; ``error``: the order was not taken."""

    query: int
    status: FleetStatus
    error: ErrorPayload | None = None


ToGateway = RouterWelcome | RouterPong | Tokens | PromptLogprobs | Ended | FleetReply
