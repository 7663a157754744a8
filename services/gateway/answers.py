"""What the OpenAI API answers, as JSON structs."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from services.gateway.timeline import Timeline
from services.gateway.token_names import ChatLogprobs, LegacyLogprobs
from shared.messages.request import FinishReason


class PromptTokensDetails(Struct, frozen=True):
    """``cached_tokens`` of the prompt were not recomputed."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Token counts of a call; a prompt that runs ``n`` times counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(Struct, frozen=True):
    """A completion or, in a stream, its next part."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None = None
    finish_reason: FinishReason | None = None
    timeline: Timeline | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """Answer or stream chunk of `/v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ChatMessage(Struct, frozen=True):
    """A whole chat answer."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatDelta(Struct, frozen=True):
    """The next part of a chat answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """One chat answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    timeline: Timeline | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """The next part of one chat answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    timeline: Timeline | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """Answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    """Stream chunk of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(Struct, frozen=True, kw_only=True):
    """A served model; ``max_model_len`` in tokens (vLLM's extension)."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "diptych"
    max_model_len: int


class ModelList(Struct, frozen=True, kw_only=True):
    """Answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]
