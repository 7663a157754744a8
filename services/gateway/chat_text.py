"""Writes the answers of `/v1/chat/completions`."""

import time

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.gateway.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
)
from services.gateway.call import Call
from services.gateway.choice import Choice, Piece
from services.gateway.chunk_template import MARK, ChunkTemplate
from services.gateway.timeline import Timeline
from services.gateway.token_names import ChatLogprobs, chat_logprobs
from services.gateway.tokenizer import Tokenizer
from services.gateway.usage import usage_of

_NOTHING = ChatDelta()


class ChatStyle(Struct, frozen=True, kw_only=True):
    """How to answer. ``logprobs``: how many of the best candidates, None for no scores."""

    model: str
    logprobs: int | None
    include_usage: bool
    timeline: bool


class ChatText:
    """``Renderer`` of one chat call."""

    def __init__(self, call: Call, tokenizer: Tokenizer, style: ChatStyle) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._style = style
        self._id = f"chatcmpl-{call.choices[0].request_id}"
        self._created = int(time.time())
        self._encode = msgspec.json.Encoder().encode
        self._greeted = [False] * len(call.choices)
        self._usage = None if style.include_usage else UNSET
        self._texts = ChunkTemplate(self._chunk_of(ChatChunkChoice(0, ChatDelta(content=MARK))))

    def chunk(self, choice: Choice) -> bytes:
        """Return the next events: the role first, then text, then the finish reason."""
        if self._greeted[choice.index] and self._style.logprobs is None and choice.end is None:
            text = choice.take_text()
            return self._texts.fill(choice.index, text) if text else b""
        piece = choice.take()
        out = b""
        if not self._greeted[choice.index]:
            self._greeted[choice.index] = True
            out = self._event(
                ChatChunkChoice(choice.index, ChatDelta(role="assistant", content=""))
            )
        logprobs = self._score(piece) if piece.tokens else None
        if piece.text or logprobs is not None:
            out += self._event(
                ChatChunkChoice(choice.index, ChatDelta(content=piece.text), logprobs)
            )
        reason = choice.finish_reason
        if reason is not None:
            timeline = self._timeline(choice)
            out += self._event(ChatChunkChoice(choice.index, _NOTHING, None, reason, timeline))
        return out

    def closing(self) -> bytes:
        """Return the usage event if it was asked for."""
        if not self._style.include_usage:
            return b""
        answer = ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._style.model,
            choices=[],
            usage=usage_of(self._call),
        )
        return b"data: " + self._encode(answer) + b"\n\n"

    def whole(self) -> bytes:
        """Return the document."""
        answer = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._style.model,
            choices=[self._choice(choice) for choice in self._call.choices],
            usage=usage_of(self._call),
        )
        return self._encode(answer)

    def _choice(self, choice: Choice) -> ChatChoice:
        piece = choice.take()
        return ChatChoice(
            choice.index,
            ChatMessage("assistant", piece.text),
            self._score(piece),
            choice.finish_reason,
            self._timeline(choice),
        )

    def _event(self, part: ChatChunkChoice) -> bytes:
        return b"data: " + self._encode(self._chunk_of(part)) + b"\n\n"

    def _chunk_of(self, part: ChatChunkChoice) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._style.model,
            choices=[part],
            usage=self._usage,
        )

    def _score(self, piece: Piece) -> ChatLogprobs | None:
        if self._style.logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, piece.tokens, piece.logprobs, self._style.logprobs)

    def _timeline(self, choice: Choice) -> Timeline | UnsetType:
        return choice.timeline() if self._style.timeline else UNSET
