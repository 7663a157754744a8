"""`POST /v1/chat/completions`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.body import read_body
from services.gateway.call import Plan
from services.gateway.chat_text import ChatStyle, ChatText
from services.gateway.common_fields import CommonFields, check_common, refuse
from services.gateway.decoding import decode_json
from services.gateway.front import Front
from services.gateway.respond import EventStream, answer_whole
from services.gateway.response_format import FormatFields, read_grammar
from services.gateway.sampling_params import (
    Extras,
    NumLogprobs,
    SamplingOptions,
    make_sampling,
    stop_strings,
)
from shared.errors import InvalidRequest

Role = Literal["system", "developer", "user", "assistant", "tool"]


class Part(Struct, frozen=True, kw_only=True):
    """One part of a message; only text is taken."""

    type: str
    text: str | None = None


class Message(Struct, frozen=True, kw_only=True):
    """One message of the conversation."""

    role: Role
    content: str | list[Part] | None = None
    name: str | None = None


class ChatFields(Struct, frozen=True, kw_only=True):
    """Fields of a chat request besides those it shares with completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None


async def create_chat_completion(front: Front, request: Request) -> Response:
    """Answer a chat request.

    Raises:
        DiptychError: the request is refused; its ``param`` names the field.
        RequestFailed: router or workers failed it.
    """
    arrival = front.clock.now()
    tenant = front.keys.tenant_of_header(request.headers.get("authorization"))
    body = await read_body(request, front.served.max_body)
    common = decode_json(body, CommonFields)
    fields = decode_json(body, ChatFields)
    options = decode_json(body, SamplingOptions)
    front.check_model(common.model)
    check_common(common)
    _check(fields)
    if fields.messages is None:
        raise InvalidRequest("messages are needed", param="messages")
    grammar = await read_grammar(front.grammar, decode_json(body, FormatFields))
    ids = await front.chat_prompt(plain_messages(fields.messages))
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    extras = Extras(logprobs=logprobs, grammar=grammar)
    plan = Plan(
        endpoint="chat",
        prompts=(ids,),
        samplings=(make_sampling(options, extras, len(ids), front.served.limits),),
        n=common.n or 1,
        stops=stop_strings(options),
        tenant=tenant,
        arrival=arrival,
        ttl=front.served.request_timeout,
    )
    call = front.call(plan)
    style = ChatStyle(
        model=front.served.model,
        logprobs=logprobs,
        include_usage=common.include_usage,
        timeline=bool(common.timeline),
    )
    renderer = ChatText(call, front.tokenizer, style)
    if common.stream:
        return EventStream(call, renderer)
    return await answer_whole(call, renderer, request)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return messages as templates want them: role and content text.

    Raises:
        InvalidRequest: a part is not text, or a message that needs content has none.
    """
    out = []
    for i, message in enumerate(messages):
        plain = {"role": message.role, "content": _text(message, i)}
        if message.name is not None:
            plain["name"] = message.name
        out.append(plain)
    return out


def _text(message: Message, i: int) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise InvalidRequest("the message has no content", param=f"messages[{i}].content")
    texts = []
    for j, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise InvalidRequest(
                f"content of type {part.type!r} is not supported, only text",
                param=f"messages[{i}].content[{j}]",
            )
        texts.append(part.text)
    return "".join(texts)


def _check(fields: ChatFields) -> None:
    refuse(bool(fields.tools), "tools", "tool calls are not offered")
    refuse(bool(fields.functions), "functions", "function calls are not offered")
    refuse(fields.tool_choice not in (None, "none", "auto"), "tool_choice", "there are no tools")
    refuse(fields.audio is not None, "audio", "answers are text")
    refuse(any(m != "text" for m in fields.modalities or ()), "modalities", "answers are text")
    if fields.top_logprobs is not None and not fields.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
