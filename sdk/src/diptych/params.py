"""From the arguments of a call to a ``Submit`` message."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, cast

import msgspec

from diptych.errors import InvalidRequest, TooLarge
from diptych.wire import MAX_FRAME, Message, ResponseFormat, SamplingParams, Submit

T = TypeVar("T")

Prompt = str | Sequence[int]
"""Text, or token ids of the served model."""

Messages = str | Sequence[Message | Mapping[str, str]]
"""Chat messages with ``role`` and ``content``; a plain string is one user message."""


class Params(TypedDict, total=False):
    """Keyword arguments of every request. All are optional.

    ``max_tokens`` (default: what the context holds), ``min_tokens``, ``temperature`` (1.0;
    0 is greedy), ``top_p`` (1.0), ``top_k`` (0: off), ``min_p`` (0.0), the three penalties,
    ``logit_bias`` (token id -> bias), ``seed`` (same seed, same output), ``stop`` (strings that
    end the output and are not part of it), ``stop_token_ids``, ``ignore_eos``, ``logprobs``
    (k best per token), ``prompt_logprobs``, ``response_format`` (a ``ResponseFormat``,
    ``"json_object"``, or a JSON schema as a dict).
    """

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    response_format: ResponseFormat | Literal["json_object"] | Mapping[str, Any] | None


def prompt_submit(prompt: Prompt, params: Params, timeline: bool) -> Submit:
    """Return the message for a completion. Raises ``InvalidRequest`` naming the argument."""
    sampling = _sampling(params)
    if isinstance(prompt, str):
        return _sendable(Submit(id=0, prompt=prompt, params=sampling, timeline=timeline))
    token_ids = _convert(list(prompt), tuple[int, ...], "prompt")
    return _sendable(Submit(id=0, token_ids=token_ids, params=sampling, timeline=timeline))


def chat_submit(messages: Messages, params: Params, timeline: bool) -> Submit:
    """Return the message for a chat. Raises ``InvalidRequest`` naming the argument."""
    if isinstance(messages, str):
        messages = [Message(role="user", content=messages)]
    plain = [msgspec.to_builtins(m) if isinstance(m, Message) else dict(m) for m in messages]
    parsed = _convert(plain, tuple[Message, ...], "messages")
    submit = Submit(id=0, messages=parsed, params=_sampling(params), timeline=timeline)
    return _sendable(submit)


def check_timeout(timeout: float) -> float:
    """Return a usable number of seconds. Raises ``InvalidRequest``."""
    if not (math.isfinite(timeout) and timeout > 0):
        message = f"timeout must be a positive number of seconds, not {timeout!r}"
        raise InvalidRequest(message, param="timeout")
    return timeout


def _sampling(params: Params) -> SamplingParams:
    values = cast("dict[str, Any]", dict(params))
    known = SamplingParams.__struct_fields__
    for name in values:
        if name not in known:
            raise InvalidRequest(f"unknown parameter `{name}`", param=name)
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    form = values.get("response_format")
    if form == "json_object":
        values["response_format"] = ResponseFormat(kind="json_object")
    elif isinstance(form, Mapping):
        schema = msgspec.json.encode(form).decode()
        values["response_format"] = ResponseFormat(kind="json_schema", schema=schema)
    return _convert(values, SamplingParams, None)


def _sendable(submit: Submit) -> Submit:
    try:
        size = len(msgspec.msgpack.encode(submit))
    except OverflowError as error:
        raise InvalidRequest("a number does not fit into 64 bits") from error
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"a text is not valid Unicode: {error}") from error
    if size > MAX_FRAME:
        raise TooLarge(f"the request takes {size} bytes, at most {MAX_FRAME} are allowed")
    return submit


def _convert(value: object, kind: type[T], param: str | None) -> T:
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        where = re.search(r"\$\.(\w+)", str(error))
        name = param or (where[1] if where else None)
        raise InvalidRequest(f"`{name}`: {error}", param=name) from error
