"""Sampling parameters of all APIs: types, ranges, defaults, and the rules that join them."""

import secrets
from typing import Annotated

from msgspec import Meta, Struct

from services.gateway.errors import ContextLengthExceeded
from shared.errors import InvalidRequest
from shared.messages.request import Grammar, Sampling

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_PROMPT_SCORES = 262_144
"""Log probabilities of one prompt, candidates included: they travel in one frame of 8 MiB."""
_MAX_STOP_LENGTH = 1024
_SEEDS = 1 << 63

NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
_Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Unit = Annotated[float, Meta(ge=0, le=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]


class SamplingOptions(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields that `/v1/completions`, `/v1/chat/completions` and the SDK share.

    ``None`` stands for the default, which is OpenAI's (temperature 1, top_p 1, no penalties).
    ``top_k`` 0 or -1 is off. ``top_p`` 0 keeps the best token only. The names beyond OpenAI's
    are vLLM's.
    """

    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: _Unit | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: _Unit | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[int, _Bias], Meta(max_length=1024)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None


class TokenLimits(Struct, frozen=True, kw_only=True):
    """What the model allows; all in tokens."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Extras(Struct, frozen=True, kw_only=True):
    """Sampling fields whose form differs between the APIs; see ``Sampling``.

    ``default_max_tokens`` None: as many as the context holds.
    """

    default_max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


def stop_strings(options: SamplingOptions) -> tuple[str, ...]:
    """Return the stop strings. Raises ``InvalidRequest`` for an empty or very long one."""
    stop = options.stop
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in stops:
        if not 0 < len(text) <= _MAX_STOP_LENGTH:
            raise InvalidRequest(
                f"a stop string must have 1 to {_MAX_STOP_LENGTH} characters, got {len(text)}",
                param="stop",
            )
    return stops


def check_prompt_length(length: int, limits: TokenLimits, param: str) -> None:
    """Raise ``InvalidRequest`` for an empty prompt or one that leaves no room for output."""
    if length < 1:
        raise InvalidRequest("the prompt must have at least one token", param=param)
    if length + 1 > limits.max_model_len:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {limits.max_model_len} tokens, but the "
            f"prompt has {length}: no room is left for output",
            param=param,
        )


def make_sampling(
    options: SamplingOptions, extras: Extras, prompt_length: int, limits: TokenLimits
) -> Sampling:
    """Apply defaults and check what spans several fields.

    Raises:
        InvalidRequest: with the offending field in ``param``.
    """
    _check_prompt_scores(extras, prompt_length)
    max_tokens = _max_tokens(options, extras, prompt_length, limits)
    min_tokens = options.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens} but at most {max_tokens} tokens may be generated",
            param="min_tokens",
        )
    bias = options.logit_bias or {}
    _check_ids(bias, limits, "logit_bias")
    stop_ids = options.stop_token_ids or []
    _check_ids(stop_ids, limits, "stop_token_ids")
    ends = () if options.ignore_eos else limits.eos_token_ids
    top_k, top_p = max(0, options.top_k or 0), _given(options.top_p, 1.0)
    if top_p == 0.0:
        top_k, top_p = 1, 1.0
    seed = secrets.randbits(63) if options.seed is None else options.seed % _SEEDS
    return Sampling(
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_given(options.temperature, 1.0),
        top_p=top_p,
        top_k=top_k,
        min_p=options.min_p or 0.0,
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        repetition_penalty=_given(options.repetition_penalty, 1.0),
        logit_bias=bias,
        stop_token_ids=tuple(sorted({*ends, *stop_ids})),
        logprobs=extras.logprobs,
        prompt_logprobs=extras.prompt_logprobs,
        grammar=extras.grammar,
    )


def _max_tokens(
    options: SamplingOptions, extras: Extras, prompt_length: int, limits: TokenLimits
) -> int:
    room = limits.max_model_len - prompt_length
    name = "max_completion_tokens" if options.max_completion_tokens else "max_tokens"
    wanted = options.max_completion_tokens or options.max_tokens
    if wanted is None:
        return room if extras.default_max_tokens is None else min(room, extras.default_max_tokens)
    if wanted > room:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {limits.max_model_len} tokens, but "
            f"{prompt_length + wanted} were requested ({prompt_length} in the prompt, {wanted} "
            f"for the output): lower {name} or shorten the prompt",
            param=name,
        )
    return wanted


def _check_prompt_scores(extras: Extras, prompt_length: int) -> None:
    scores = 0 if extras.prompt_logprobs is None else extras.prompt_logprobs + 1
    if scores * prompt_length > MAX_PROMPT_SCORES:
        raise InvalidRequest(
            f"{scores} log probabilities for each of {prompt_length} prompt tokens are more than "
            f"{MAX_PROMPT_SCORES}: ask for fewer or shorten the prompt",
            param="logprobs",
        )


def _check_ids(ids: dict[int, float] | list[int], limits: TokenLimits, param: str) -> None:
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            raise InvalidRequest(
                f"token id {token} is outside the vocabulary (0 to {limits.vocab_size - 1})",
                param=param,
            )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
