"""Read the tensor table of a GGUF file in milliseconds, without its weights and vocabulary.

Layout: the GGUF specification, versions 2 and 3 (little endian). The gguf package reads the
same, but takes seconds over a large vocabulary.
"""

import math
import struct
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from shared.errors import ResourceMissing

_MAGIC = b"GGUF"
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of each scalar metadata type."""
_STRING, _ARRAY, _U32 = 8, 9, 4
_MAX_COUNT = 1 << 24


class GgufSummary(Struct, frozen=True, kw_only=True):
    """``parameters`` in all tensors; ``size`` is the file's size in bytes as it should be."""

    parameters: int
    size: int


def summarise(path: Path) -> GgufSummary:
    """Read a header. Raises ``ResourceMissing`` if the file is no GGUF file or cut off."""
    try:
        with path.open("rb") as file:
            summary = _summarise(file)
    except (struct.error, UnicodeDecodeError, ValueError, KeyError) as error:
        raise ResourceMissing(f"{path} is not a complete GGUF file: {error}") from error
    except OSError as error:
        raise ResourceMissing(f"cannot read {path}: {error.strerror}") from error
    size = path.stat().st_size
    if size < summary.size:
        raise ResourceMissing(
            f"{path} is cut off: {size} bytes of at least {summary.size}; fetch it again"
        )
    return summary


def _summarise(file: BinaryIO) -> GgufSummary:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if file.read(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version, tensors, pairs = _unpack(file, "<IQQ")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}; 2 and 3 are supported")
    alignment = 32
    for _ in range(_bounded(pairs)):
        key, value = _string(file), _value(file, _unpack(file, "<I")[0])
        if key == b"general.alignment" and value:
            alignment = value
    parameters, end = 0, 0
    for _ in range(_bounded(tensors)):
        _string(file)
        (dimensions,) = _unpack(file, "<I")
        count = math.prod(_unpack(file, f"<{_bounded(dimensions)}Q"))
        kind, offset = _unpack(file, "<IQ")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        parameters += count
        end = max(end, offset + count // block * block_bytes)
    start = -(-file.tell() // alignment) * alignment
    return GgufSummary(parameters=parameters, size=start + end)


def _unpack(file: BinaryIO, layout: str) -> tuple[int, ...]:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _string(file: BinaryIO) -> bytes:
    (length,) = _unpack(file, "<Q")
    return file.read(_bounded(length))


def _value(file: BinaryIO, kind: int) -> int | None:
    """Skip a metadata value; unsigned 32-bit numbers are returned."""
    if kind == _U32:
        return _unpack(file, "<I")[0]
    if kind == _STRING:
        _string(file)
    elif kind == _ARRAY:
        item, count = _unpack(file, "<IQ")
        if item in _SCALARS:
            file.seek(_SCALARS[item] * _bounded(count), 1)
        else:
            for _ in range(_bounded(count)):
                _value(file, item)
    else:
        file.seek(_SCALARS[kind], 1)
    return None


def _bounded(count: int) -> int:
    if count > _MAX_COUNT:
        raise ValueError(f"a count of {count} makes no sense")
    return count
