"""The first message on every link: who speaks, and whether the two sides fit together."""

from typing import Annotated, Final, get_args

import msgspec
from msgspec import Meta, Struct

from shared.kv.layout import KvDtype

WIRE_VERSION = 1

_CONVERTIBLE: Final = frozenset(get_args(KvDtype))


class Compatibility(Struct, frozen=True, kw_only=True):
    """Everything two workers must share before one may read the other's KV.

    ``model`` identifies weights and tokenizer, ``layout`` is ``KvLayout.shape_fingerprint()``.
    ``kv_dtype`` may differ where this version knows both: the reader converts. One of a later
    version is no malformed message: it is a string here.
    """

    wire_version: int = WIRE_VERSION
    model: str
    kv_dtype: str
    block_size: int
    layout: str

    def differences(self, other: "Compatibility") -> list[str]:
        """Name the fields that keep ``other`` from fitting, with both values.

        Of two versions nothing else is compared: the fields of the other one may mean anything.
        """
        if self.wire_version != other.wire_version:
            return [two_versions(self.wire_version, other.wire_version)]
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        if {self.kv_dtype, other.kv_dtype} <= _CONVERTIBLE:
            theirs["kv_dtype"] = self.kv_dtype
        return [f"{k}: {mine[k]!r} here, {theirs[k]!r} there" for k in mine if mine[k] != theirs[k]]


class Spoken(Struct, frozen=True):
    """The one field of ``Compatibility`` that every version has."""

    wire_version: int


class UnreadHello(Struct, tag="hello", frozen=True, kw_only=True):
    """Stands for a worker's hello of another version of which this one can read no more.

    Whatever else a later version says there, its author is refused by name, not by silence.

    Raises:
        ValueError: it is of this version, so it is garbage (msgspec makes it a
            ``ValidationError``).
    """

    worker: Annotated[str, Meta(max_length=64)]
    compatibility: Spoken

    def __post_init__(self) -> None:
        if self.compatibility.wire_version == WIRE_VERSION:
            raise ValueError("a malformed hello of this very version")

    def difference(self) -> str:
        """Name both versions."""
        return two_versions(WIRE_VERSION, self.compatibility.wire_version)


def two_versions(mine: int, theirs: int) -> str:
    """Return the sentence part for a peer of another wire version."""
    return f"wire_version: {mine} here, {theirs} there; install the same release on both sides"
