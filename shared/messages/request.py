"""What a generation request is, on every link that carries one."""

from typing import Literal

from msgspec import Struct

from shared.ids import RequestId, TenantId

FinishReason = Literal["stop", "length"]


class Grammar(Struct, frozen=True, kw_only=True):
    """Constraint on the output. ``schema`` is JSON text, used by ``json_schema`` only."""

    kind: Literal["json_object", "json_schema"]
    schema: str = ""


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters after validation by the gateway.

    ``seed`` is always set (the gateway draws one when the client sends none), so that any
    worker reproduces the stream: token ``i`` depends on ``(seed, i)`` and the context only.
    ``top_k`` 0 is off. ``stop_token_ids`` holds the model's end tokens unless ``ignore_eos``.
    ``logprobs`` None is off, 0 is the chosen token only, k adds the k best.
    """

    seed: int
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


class Request(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request or, with ``output_ids``, the rest of one that is being resumed.

    ``ttl`` is the time left in seconds when the message was sent (clocks of hosts differ).
    ``force_split`` makes the router ignore the split threshold (readiness probe, benchmarks).
    """

    request_id: RequestId
    tenant: TenantId
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    output_ids: tuple[int, ...] = ()
    ttl: float
    force_split: bool = False


class TokenLogprob(Struct, frozen=True, array_like=True, gc=False):
    """Log probability of the chosen token, and ``(token, logprob)`` of the best ones."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PhaseTimes(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Moments of one request on one worker, in that host's ``CLOCK_MONOTONIC`` seconds.

    ``accepted``: dispatch received. ``started``: first prefill chunk handed to the engine.
    ``prefilled``: first token sampled. ``transferred``: all KV verified at the decode worker.
    ``stepped``: decode's first own token sampled. ``finished``: last token sampled.
    A moment that did not happen on this worker is None.
    """

    accepted: float | None = None
    started: float | None = None
    prefilled: float | None = None
    transferred: float | None = None
    stepped: float | None = None
    finished: float | None = None
