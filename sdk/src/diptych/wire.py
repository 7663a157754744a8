"""Client (DEALER) <-> gateway (ROUTER): every message of the ZeroMQ client link.

One message is one frame: a msgpack map with a ``type`` tag. The rules of the link:

*Sessions.* A client dials a fresh socket for every session. Its routing id is
``routing_id(incarnation, session)``, its first message ``ClientHello``; the gateway answers
``Welcome`` or ``Refused``. A hello of a known client incarnation with a higher session
replaces the earlier session: the gateway silently cancels what that one had open. Messages
other than hello and ping from a routing id without a session are counted and dropped.

*Liveness.* The client sends ``Ping`` every ``PING_INTERVAL`` seconds; ``Pong`` names the
session the gateway knows under that routing id, 0 for none. A side that hears nothing for
``PEER_TIMEOUT`` takes the other for gone: the gateway cancels the client's requests, the
client dials again. Where the gateway cannot deliver a message (peer gone, queue full) it
forgets the session, and the client learns that from the next ``Pong`` or dials anew.

*Requests.* ``Submit.id`` is used once per client incarnation; each is answered by ``Accepted``
(at most once, before any ``Delta``) and exactly one ``Ended``. A client that lost its session
or found a gap submits the rest under a *new* id, with the output tokens it has in
``received``, the ``seed`` from ``Accepted`` and the prompt as token ids. The gateway then
replays detokenisation and stop matching over ``received`` one token at a time and sends only
what follows; when ``received`` is already a whole output (an end token, a stop string, the
token limit) it sends ``Accepted`` and ``Ended`` at once.

*Text.* Text is a function of the output tokens alone, fed to the detokeniser and stop matcher
one by one. Text that may yet turn out to be a stop string, or half a character, is held back
and comes with a later token or in ``Ended.text``. ``index`` and ``text_at`` count tokens and
characters (Python ``str`` indices) from the start of the whole output, resumed part included.
"""

from typing import Final, Literal

from msgspec import Struct

WIRE_VERSION: Final = 1
PING_INTERVAL: Final = 1.0
"""Seconds between two pings of a client."""
PEER_TIMEOUT: Final = 5.0
"""Seconds of silence after which either side takes the other for gone."""
MAX_FRAME: Final = 8 << 20
"""Bytes of the largest frame either side may send."""

FinishReason = Literal["stop", "length"]
ChatRole = Literal["system", "developer", "user", "assistant", "tool"]


def routing_id(incarnation: int, session: int) -> bytes:
    """Return the routing id of one session, so that no session inherits another's queue."""
    return f"sdk#{incarnation:x}#{session}".encode()


class WireError(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error. ``param`` names the offending field, ``retry_after`` is in seconds.

    ``code`` is a plain string so that old clients read the codes of new gateways.
    """

    code: str
    message: str
    retryable: bool = False
    param: str | None = None
    retry_after: float | None = None


class Message(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One chat message."""

    role: ChatRole
    content: str
    name: str | None = None


class ResponseFormat(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Constraint on the output. ``schema`` is JSON text, needed by ``json_schema`` only."""

    kind: Literal["text", "json_object", "json_schema"] = "text"
    schema: str | None = None


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample; the gateway checks ranges and answers ``invalid_request`` with ``param``.

    ``max_tokens`` None: as many as the context holds. ``seed`` None: the gateway draws one.
    ``top_k`` 0 is off. ``stop_token_ids`` are added to the model's end tokens, which
    ``ignore_eos`` takes away. ``logprobs`` None is off, 0 the chosen token only, k adds the k
    best; ``prompt_logprobs`` likewise.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None


class ClientHello(Struct, tag="hello", frozen=True, kw_only=True, omit_defaults=True):
    """First message of a session. ``session`` counts up from 1 within one incarnation."""

    wire_version: int
    incarnation: int
    session: int
    api_key: str | None = None


class Submit(Struct, tag="submit", frozen=True, kw_only=True, omit_defaults=True):
    """Run a request, or the rest of one.

    Exactly one of ``prompt``, ``token_ids`` and ``messages`` is set. ``received`` holds the
    output tokens the client already has. ``timeout`` is the time left in seconds, None for
    the gateway's limit. ``timeline`` asks for ``Ended.timeline``.
    """

    id: int
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    params: SamplingParams = SamplingParams()
    received: tuple[int, ...] = ()
    timeout: float | None = None
    timeline: bool = False


class Cancel(Struct, tag="cancel", frozen=True, kw_only=True):
    """Stop a request; answered by ``Ended`` without reason and error. Unknown ids are ignored."""

    id: int


class Ping(Struct, tag="ping", frozen=True, kw_only=True):
    """Heartbeat; answered by ``Pong``, with or without a session."""


Role = Literal["prefill", "decode", "mixed"]


class WorkerOrder(Struct, frozen=True, kw_only=True):
    """Empty a worker; with ``role``, which may be its own, it serves again afterwards."""

    worker: str
    role: Role | None = None


class StatusQuery(Struct, tag="status?", frozen=True, kw_only=True, omit_defaults=True):
    """Ask for ``StatusReply``, and give an order first. For operators."""

    query: int
    order: WorkerOrder | None = None


class Bye(Struct, tag="bye", frozen=True, kw_only=True):
    """The client leaves; the gateway cancels what it has open and forgets the session."""


FromClient = ClientHello | Submit | Cancel | Ping | StatusQuery | Bye


class Welcome(Struct, tag="welcome", frozen=True, kw_only=True):
    """The session is open. ``model`` is the served name, ``max_model_len`` in tokens."""

    incarnation: int
    session: int
    model: str
    max_model_len: int


class Refused(Struct, tag="refused", frozen=True, kw_only=True):
    """The session is not opened; a retryable error invites another try."""

    error: WireError


class Goodbye(Struct, tag="goodbye", frozen=True, kw_only=True):
    """The gateway is going away and leaves the session's requests unended.

    The client dials again and resumes them, at the successor or at another gateway.
    """


class Accepted(Struct, tag="accepted", frozen=True, kw_only=True, omit_defaults=True):
    """The request is valid and in the router's hands.

    ``seed`` is the one in effect. ``prompt_ids`` is set unless the prompt came as token ids.
    """

    id: int
    seed: int
    prompt_tokens: int
    prompt_ids: tuple[int, ...] | None = None


class TopLogprob(Struct, frozen=True, array_like=True, gc=False):
    """One of the best candidates at a position."""

    token: int
    text: str
    logprob: float


class Logprob(Struct, frozen=True, array_like=True, gc=False):
    """Log probability of a token and of the best candidates at its position, best first."""

    token: int
    text: str
    logprob: float
    top: tuple[TopLogprob, ...] = ()


class DeltaItem(Struct, frozen=True, array_like=True, gc=False):
    """New output of one request.

    ``index`` is the position of ``tokens[0]``, ``text_at`` that of ``text[0]``; ``logprobs``
    has one entry per token where asked for. Token and text ranges need not match: see *Text*.
    """

    id: int
    index: int
    tokens: tuple[int, ...]
    text_at: int
    text: str
    logprobs: tuple[Logprob, ...] | None = None


class Delta(Struct, tag="delta", frozen=True, kw_only=True):
    """All new output of one tick for one client, in order per request."""

    items: tuple[DeltaItem, ...]


class PromptLogprobs(Struct, tag="plp", frozen=True, kw_only=True):
    """Log probabilities of prompt tokens 1..n-1 (the first has none); before the first token."""

    id: int
    items: tuple[Logprob, ...]


class Usage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts of a request; ``cached_tokens`` of the prompt were not recomputed."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class PhaseTimes(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Moments on one worker in its host's ``CLOCK_MONOTONIC`` seconds; None: did not happen."""

    accepted: float | None = None
    started: float | None = None
    prefilled: float | None = None
    transferred: float | None = None
    stepped: float | None = None
    finished: float | None = None


class Timeline(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a request spent its time, as the router saw its last dispatch."""

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
    """The one terminal message of a ``Submit``: finished, cancelled (neither field) or failed.

    ``text`` is what was held back and belongs to the output, starting at ``text_at``;
    ``num_tokens`` is the length of the whole output in tokens, so that the client sees a gap.
    """

    id: int
    reason: FinishReason | None = None
    error: WireError | None = None
    num_tokens: int = 0
    text_at: int = 0
    text: str = ""
    usage: Usage = Usage()
    timeline: Timeline | None = None


class Pong(Struct, tag="pong", frozen=True, kw_only=True):
    """Answer to ``Ping``. ``session`` 0: this routing id has no session, say hello again."""

    incarnation: int
    session: int


class StatusReply(Struct, tag="status", frozen=True, kw_only=True, omit_defaults=True):
    """Answer to ``StatusQuery``: the router's ``FleetStatus`` encoded as msgpack, or an error."""

    query: int
    fleet: bytes = b""
    error: WireError | None = None


ToClient = (
    Welcome | Refused | Goodbye | Accepted | Delta | PromptLogprobs | Ended | Pong | StatusReply
)
