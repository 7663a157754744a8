"""Server-sent events that differ in index and text only: the document is encoded once."""

import msgspec
from msgspec import Struct

MARK = "\0text\0"
"""Stands for the text in the document a template is made of; no model has such a name."""
_INDEX = b'"index":0'
"""Stands for the index; within JSON's strings a quote does not look like this."""


class ChunkTemplate:
    """The events of one call. ``document`` has one choice, of index 0 and then text ``MARK``."""

    def __init__(self, document: Struct) -> None:
        self._encode = msgspec.json.Encoder().encode
        before, tail = self._encode(document).rsplit(self._encode(MARK), 1)
        head, self._middle = before.rsplit(_INDEX, 1)
        self._head, self._tail = b'data: %b"index":' % head, tail + b"\n\n"

    def fill(self, index: int, text: str) -> bytes:
        """Return the event of the next text of a choice."""
        number, encoded = str(index).encode(), self._encode(text)
        return b"".join((self._head, number, self._middle, encoded, self._tail))
