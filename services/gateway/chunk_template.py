"""Server-sent events that differ in one text only: the document is encoded once."""

import msgspec
from msgspec import Struct

MARK = "\0text\0"
"""Stands for the text in the document a template is made of; no model has such a name."""


class ChunkTemplate:
    """The event of ``document``, whose last ``MARK`` is where texts go."""

    def __init__(self, document: Struct) -> None:
        self._encode = msgspec.json.Encoder().encode
        head, tail = self._encode(document).rsplit(self._encode(MARK), 1)
        self._head, self._tail = b"data: " + head, tail + b"\n\n"

    def fill(self, text: str) -> bytes:
        """Return the event with this text."""
        return self._head + self._encode(text) + self._tail
