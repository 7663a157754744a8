"""Log probabilities in OpenAI's two shapes, with token ids turned into text."""

from collections.abc import Sequence

from msgspec import Struct

from services.gateway.tokenizer import Tokenizer
from shared.messages.request import TokenLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say (OpenAI's convention)."""


class TopLogprob(Struct, frozen=True):
    """One candidate at a position. ``bytes`` tells apart what ``token`` cannot show."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(Struct, frozen=True):
    """One output token of a chat answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """``logprobs`` of a chat choice."""

    content: list[ContentLogprob]
    refusal: None = None


class LegacyLogprobs(Struct):
    """``logprobs`` of a completion choice: parallel lists, one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], scores: Sequence[TokenLogprob | None], top: int
) -> ChatLogprobs:
    """Return log probabilities for chat; ``top`` best candidates per position."""
    content = []
    for token, score in zip(tokens, scores, strict=True):
        score = score or TokenLogprob(LOWEST)
        own = _candidate(tokenizer, token, score.logprob)
        best = [_candidate(tokenizer, t, value) for t, value in score.top[:top]]
        content.append(ContentLogprob(own.token, own.logprob, own.bytes, best))
    return ChatLogprobs(content)


def legacy_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    scores: Sequence[TokenLogprob | None],
    offsets: Sequence[int],
    top: int,
) -> LegacyLogprobs:
    """Return log probabilities for completions; a token without score (the first) has None."""
    out = LegacyLogprobs(list(offsets), [], [], [])
    for token, score in zip(tokens, scores, strict=True):
        name = legacy_name(tokenizer, token)
        out.tokens.append(name)
        if score is None:
            out.token_logprobs.append(None)
            out.top_logprobs.append(None)
            continue
        best = {legacy_name(tokenizer, t): _finite(value) for t, value in score.top[:top]}
        if top:
            best.setdefault(name, _finite(score.logprob))
        out.token_logprobs.append(_finite(score.logprob))
        out.top_logprobs.append(best if top else None)
    return out


def legacy_name(tokenizer: Tokenizer, token: int) -> str:
    r"""Return a token's text, ``bytes:\xe2\x80`` where it is no text by itself."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _candidate(tokenizer: Tokenizer, token: int, logprob: float) -> TopLogprob:
    raw = tokenizer.token_bytes(token)
    return TopLogprob(raw.decode("utf-8", "replace"), _finite(logprob), list(raw))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
