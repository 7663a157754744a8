"""The first message on every link: who speaks, and whether the two sides fit together."""

from typing import Final, get_args

import msgspec
from msgspec import Struct

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
        """Name the fields that keep ``other`` from fitting, with both values."""
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        if {self.kv_dtype, other.kv_dtype} <= _CONVERTIBLE:
            theirs["kv_dtype"] = self.kv_dtype
        return [f"{k}: {mine[k]!r} here, {theirs[k]!r} there" for k in mine if mine[k] != theirs[k]]
