"""Token ids to text, one token at a time; the text is a function of the tokens alone.

Half a character is held back until it is whole. Feeding tokens one by one gives the same text
as decoding all at once, for byte-level tokenizers exactly.
"""

import codecs
from collections.abc import Callable, Container, Sequence
from typing import Protocol

_MAX_HELD = 8
"""Tokens that may wait for the end of a character; more is invalid text, shown as such."""


class Detokenizer(Protocol):
    """Incremental decoder of one output."""

    def push(self, token: int) -> str:
        """Take the next token and return the text that became certain."""
        ...

    def flush(self) -> str:
        """Return what was held back; nothing may be pushed afterwards."""
        ...


class BytePieces:
    """A byte-level vocabulary: token ``id`` is ``raw[id]``, and ``whole[id]`` if that is text."""

    def __init__(self, raw: Sequence[bytes]) -> None:
        self.raw = raw
        self.whole = [_text_of(piece) for piece in raw]


class ByteDetokenizer:
    """For byte-level vocabularies: every token is a byte string."""

    def __init__(self, pieces: BytePieces) -> None:
        self._raw, self._whole = pieces.raw, pieces.whole
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds = False

    def push(self, token: int) -> str:
        if not 0 <= token < len(self._whole):
            return ""
        whole = self._whole[token]
        if whole is not None and not self._holds:
            return whole
        text = self._decoder.decode(self._raw[token])
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For any other tokenizer: decode a short window twice and take the difference.

    The window starts where the text was last certain, so that decoders which treat the first
    token of a text differently (a leading space) see the same beginning both times.
    """

    def __init__(self, decode: Callable[[list[int]], str], skip: Container[int]) -> None:
        self._decode = decode
        self._skip = skip
        self._ids: list[int] = []
        self._certain = 0

    def push(self, token: int) -> str:
        if token in self._skip:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        whole = not text.endswith("\N{REPLACEMENT CHARACTER}")
        if whole or len(self._ids) - self._certain >= _MAX_HELD:
            return self._advance(text)
        return ""

    def flush(self) -> str:
        return self._advance(self._decode(self._ids)) if self._ids else ""

    def _advance(self, text: str) -> str:
        known = self._decode(self._ids[: self._certain])
        self._ids = self._ids[self._certain :]
        self._certain = len(self._ids)
        return text[len(known) :]


def _text_of(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
