"""Writes the answers of `/v1/completions`."""

import time

import msgspec
from msgspec import UNSET, Struct

from services.gateway.answers import Completion, CompletionChoice
from services.gateway.call import Call
from services.gateway.choice import Choice, Piece
from services.gateway.chunk_template import MARK, ChunkTemplate
from services.gateway.token_names import LegacyLogprobs, legacy_logprobs
from services.gateway.tokenizer import Tokenizer
from services.gateway.usage import usage_of
from shared.messages.request import TokenLogprob


class CompletionStyle(Struct, frozen=True, kw_only=True):
    """How to answer. ``echo`` holds the text of every prompt if it is to be repeated."""

    model: str
    logprobs: int | None
    echo: tuple[str, ...] | None
    include_usage: bool
    timeline: bool


class CompletionText:
    """``Renderer`` of one completion call."""

    def __init__(self, call: Call, tokenizer: Tokenizer, style: CompletionStyle) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._style = style
        self._id = f"cmpl-{call.choices[0].request_id}"
        self._created = int(time.time())
        self._encode = msgspec.json.Encoder().encode
        self._echoed = [style.echo is None] * len(call.choices)
        self._usage = None if style.include_usage else UNSET
        self._text_only = style.echo is None and style.logprobs is None
        self._texts = ChunkTemplate(self._event(CompletionChoice(0, MARK)))

    def chunk(self, choice: Choice) -> bytes:
        """Return the next event of a choice, empty when there is nothing to show."""
        if self._text_only and choice.end is None:
            text = choice.take_text()
            return self._texts.fill(choice.index, text) if text else b""
        unscored = self._waits_for_prompt(choice)
        if unscored and choice.end is None:
            return b""
        part = self._part(choice)
        if not part.text and part.finish_reason is None and not _scored(part):
            return b""
        return b"data: " + self._encode(self._event(part)) + b"\n\n"

    def closing(self) -> bytes:
        """Return the usage event if it was asked for."""
        if not self._style.include_usage:
            return b""
        return b"data: " + self._encode(self._answer([])) + b"\n\n"

    def whole(self) -> bytes:
        """Return the document."""
        return self._encode(self._answer([self._part(choice) for choice in self._call.choices]))

    def _event(self, part: CompletionChoice) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._style.model,
            choices=[part],
            usage=self._usage,
        )

    def _answer(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._style.model,
            choices=choices,
            usage=usage_of(self._call),
        )

    def _part(self, choice: Choice) -> CompletionChoice:
        style, piece = self._style, choice.take()
        prefix, text = 0, piece.text
        logprobs: LegacyLogprobs | None = None
        if style.echo is not None:
            echo = style.echo[choice.index // self._call.plan.n]
            prefix = len(echo)
            if not self._echoed[choice.index]:
                text = echo + text
        if style.logprobs is not None:
            logprobs = self._score(choice, piece, prefix, style.logprobs)
        self._echoed[choice.index] = True
        return CompletionChoice(
            choice.index,
            text,
            logprobs,
            choice.finish_reason,
            choice.timeline() if style.timeline and choice.end is not None else UNSET,
        )

    def _score(self, choice: Choice, piece: Piece, prefix: int, top: int) -> LegacyLogprobs:
        tokens: list[int] = list(piece.tokens)
        scores: list[TokenLogprob | None] = list(piece.logprobs)
        offsets = [prefix + offset for offset in piece.offsets]
        if not self._echoed[choice.index]:
            tokens = [*choice.prompt_ids, *tokens]
            known = choice.prompt_logprobs or ()
            unknown = len(choice.prompt_ids) - len(known)
            scores = [*[None] * unknown, *known, *scores]
            offsets = [*self._prompt_offsets(choice.prompt_ids), *offsets]
        return legacy_logprobs(self._tokenizer, tokens, scores, offsets, top)

    def _prompt_offsets(self, ids: tuple[int, ...]) -> list[int]:
        detokenizer, at, offsets = self._tokenizer.detokenizer(), 0, []
        for token in ids:
            offsets.append(at)
            at += len(detokenizer.push(token))
        return offsets

    def _waits_for_prompt(self, choice: Choice) -> bool:
        """The prompt is to be echoed with log probabilities that are not here yet."""
        wanted = self._style.echo is not None and self._style.logprobs is not None
        return wanted and choice.prompt_logprobs is None and not self._echoed[choice.index]


def _scored(part: CompletionChoice) -> bool:
    return part.logprobs is not None and bool(part.logprobs.tokens)
