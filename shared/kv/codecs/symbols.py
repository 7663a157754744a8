"""Entropy coding of a matrix of small symbols, each column with its own frequencies.

The coder is constriction's ANS coder (stack order: what is encoded last is decoded first). The
frequencies are those of the very symbols, 8 bits each, and travel deflated in front of them.
"""

import zlib
from typing import Final, cast

import constriction
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shared.errors import TransferFailed

Symbols = NDArray[np.int32]
_Frequencies = NDArray[np.uint8]

_DEFLATE_LEVEL: Final = 6
_AnsCoder: Final = constriction.stream.stack.AnsCoder
_Categorical: Final = constriction.stream.model.Categorical


class CodedSymbols(Struct, frozen=True):
    """``table``: deflated frequencies; ``words``: the code."""

    table: bytes
    words: NDArray[np.uint32]


def encode_symbols(symbols: Symbols, count: int) -> CodedSymbols:
    """Encode ``symbols`` [columns, rows], all in [0, ``count``)."""
    frequencies = _frequencies(symbols, count)
    coder = _AnsCoder()
    for column in range(len(symbols) - 1, -1, -1):
        coder.encode_reverse(symbols[column], _model(frequencies[column]))
    words = cast("NDArray[np.uint32]", coder.get_compressed())
    return CodedSymbols(zlib.compress(frequencies.tobytes(), _DEFLATE_LEVEL), words)


def decode_symbols(coded: CodedSymbols, columns: int, rows: int, count: int) -> Symbols:
    """Return the symbols [``columns``, ``rows``].

    Raises:
        TransferFailed: the table or the code is malformed.
    """
    frequencies = _inflate(coded.table, columns * count).reshape(columns, count)
    if not bool(frequencies.any(axis=1).all()):
        raise TransferFailed("a frequency table of encoded KV is empty")
    try:
        coder = _AnsCoder(coded.words)
    except ValueError as error:
        raise TransferFailed(f"the entropy code of encoded KV is malformed: {error}") from error
    symbols = np.empty((columns, rows), dtype=np.int32)
    for column in range(columns):
        symbols[column] = coder.decode(_model(frequencies[column]), rows)
    if not coder.is_empty():
        raise TransferFailed("the entropy code of encoded KV is longer than its symbols")
    return symbols


def _frequencies(symbols: Symbols, count: int) -> _Frequencies:
    """Count each column's symbols, scaled to 255 for its most frequent; what occurs is >= 1."""
    columns = len(symbols)
    flat = symbols + np.arange(columns, dtype=np.int32)[:, None] * count
    counts = np.bincount(flat.reshape(-1), minlength=columns * count).reshape(columns, count)
    most = counts.max(axis=1, keepdims=True)
    scaled: _Frequencies = (-(-counts * 255 // most)).astype(np.uint8)
    return scaled


def _model(frequencies: _Frequencies) -> object:
    # One symbol more than can occur: a distribution over a single one is not a distribution.
    weights = np.zeros(len(frequencies) + 1, dtype=np.float64)
    weights[:-1] = frequencies
    return _Categorical(weights / weights.sum(), perfect=False)


def _inflate(table: bytes, size: int) -> _Frequencies:
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(table, size + 1)
    except zlib.error as error:
        raise TransferFailed(f"a frequency table of encoded KV is malformed: {error}") from error
    if len(data) != size or not inflate.eof:
        raise TransferFailed(f"a frequency table of encoded KV has not {size} entries")
    return np.frombuffer(data, dtype=np.uint8)
