"""`POST /v1/completions`."""

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.body import read_body
from services.gateway.call import Plan
from services.gateway.common_fields import (
    CommonFields,
    NumOutputs,
    check_common,
    refuse,
)
from services.gateway.completion_text import CompletionStyle, CompletionText
from services.gateway.decoding import decode_json
from services.gateway.front import MAX_OUTPUTS, Front
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

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""


class CompletionFields(Struct, frozen=True, kw_only=True):
    """Fields of a completion request besides those it shares with chat."""

    prompt: object = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    best_of: NumOutputs | None = None
    suffix: str | None = None


class _Prompt(Struct, frozen=True):
    ids: tuple[int, ...]
    text: str | None


async def create_completion(front: Front, request: Request) -> Response:
    """Answer a completion request.

    Raises:
        DiptychError: the request is refused; its ``param`` names the field.
        RequestFailed: router or workers failed it.
    """
    arrival = front.clock.now()
    tenant = front.keys.tenant_of_header(request.headers.get("authorization"))
    body = await read_body(request, front.served.max_body)
    common = decode_json(body, CommonFields)
    fields = decode_json(body, CompletionFields)
    options = decode_json(body, SamplingOptions)
    front.check_model(common.model)
    check_common(common)
    n = common.n or 1
    refuse(bool(fields.suffix), "suffix", "fill-in-the-middle is not offered")
    refuse((fields.best_of or n) != n, "best_of", "use n")
    grammar = await read_grammar(front.grammar, decode_json(body, FormatFields))
    extras = Extras(
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=fields.logprobs,
        prompt_logprobs=fields.logprobs if fields.echo else None,
        grammar=grammar,
    )
    prompts = await _read_prompts(front, fields.prompt, n)
    plan = Plan(
        endpoint="completions",
        prompts=tuple(prompt.ids for prompt in prompts),
        samplings=tuple(
            make_sampling(options, extras, len(prompt.ids), front.served.limits)
            for prompt in prompts
        ),
        n=n,
        stops=stop_strings(options),
        tenant=tenant,
        arrival=arrival,
        ttl=front.served.request_timeout,
    )
    call = front.call(plan)
    style = CompletionStyle(
        model=front.served.model,
        logprobs=fields.logprobs,
        echo=tuple(_echo(front, prompt) for prompt in prompts) if fields.echo else None,
        include_usage=common.include_usage,
        timeline=bool(common.timeline),
    )
    renderer = CompletionText(call, front.tokenizer, style)
    if common.stream:
        return EventStream(call, renderer)
    return await answer_whole(call, renderer, request)


async def _read_prompts(front: Front, prompt: object, n: int) -> list[_Prompt]:
    """Read text, texts, token ids or lists of token ids."""
    if prompt is None:
        raise InvalidRequest("a prompt is needed", param="prompt")
    entries: list[object] = [prompt]
    if isinstance(prompt, list):
        if not prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if not _is_ids(prompt):
            entries = prompt
    if len(entries) * n > MAX_OUTPUTS:
        raise InvalidRequest(
            f"{len(entries)} prompts times n = {n} are more than {MAX_OUTPUTS} outputs",
            param="prompt" if len(entries) > MAX_OUTPUTS else "n",
        )
    return [await _read_prompt(front, entry) for entry in entries]


async def _read_prompt(front: Front, entry: object) -> _Prompt:
    if isinstance(entry, str):
        if not entry:
            raise InvalidRequest("the prompt is empty", param="prompt")
        return _Prompt(await front.encode(entry, "prompt"), entry)
    if isinstance(entry, list) and _is_ids(entry):
        return _Prompt(front.check_prompt_ids(entry, "prompt"), None)
    raise InvalidRequest(
        "the prompt must be a text, a list of texts, a list of token ids, or a list of such lists",
        param="prompt",
    )


def _is_ids(entries: list[object]) -> bool:
    return all(type(entry) is int for entry in entries)


def _echo(front: Front, prompt: _Prompt) -> str:
    return front.tokenizer.decode(prompt.ids) if prompt.text is None else prompt.text
