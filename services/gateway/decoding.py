"""Request bytes to typed structs, with the offending field named when they do not fit."""

import re
from typing import TypeVar

import msgspec

from shared.errors import InvalidRequest

T = TypeVar("T")

_PATH = re.compile(r"^(.*) - at `(?:key` in `)?\$\.?([^`]*)`$", re.DOTALL)
_BYTE = re.compile(r"\(byte (\d+)\)")
_FIELD_BEFORE = re.compile(rb'"([A-Za-z_]{1,64})"\s*:\s*-?$')


def decode_json(body: bytes, kind: type[T]) -> T:
    """Decode a JSON body. Unknown fields are ignored, known ones must have the right type.

    Raises:
        InvalidRequest: not JSON, not UTF-8, nested too deep, wrong type or out of range.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"invalid JSON: {error}", param=_field_at(body, error)) from error
    except (RecursionError, UnicodeError) as error:
        raise InvalidRequest(f"invalid JSON: {error}") from error


def convert(value: object, kind: type[T]) -> T:
    """Convert plain values to ``kind`` under the same rules as ``decode_json``."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error


def _invalid(error: msgspec.ValidationError) -> InvalidRequest:
    found = _PATH.match(str(error))
    if found is None:
        return InvalidRequest(f"invalid request: {error}")
    param = found[2].removesuffix("[...]") or None
    return InvalidRequest(f"invalid {param or 'request'}: {found[1]}", param=param)


def _field_at(body: bytes, error: msgspec.DecodeError) -> str | None:
    """Name the field whose value broke the JSON syntax, such as ``NaN`` in a number's place."""
    position = _BYTE.search(str(error))
    if position is None:
        return None
    found = _FIELD_BEFORE.search(body[max(0, int(position[1]) - 80) : int(position[1])])
    return None if found is None else found[1].decode()
