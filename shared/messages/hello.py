"""The first message on every link: who speaks, and whether the two sides fit together."""

import hashlib
from typing import Literal

import msgspec
from msgspec import Struct

WIRE_VERSION = 1


class Compatibility(Struct, frozen=True, kw_only=True):
    """Everything two workers must share before one may read the other's KV.

    ``model`` identifies weights and tokenizer, ``layout`` is ``KvLayout.fingerprint()``.
    """

    wire_version: int = WIRE_VERSION
    model: str
    kv_dtype: Literal["fp32", "bf16", "fp16"]
    block_size: int
    layout: str

    def digest(self) -> str:
        """Return a stable hex digest, equal across processes, restarts and machines."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()

    def differences(self, other: "Compatibility") -> list[str]:
        """Name the fields in which ``other`` differs, with both values."""
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return [f"{k}: {mine[k]!r} here, {theirs[k]!r} there" for k in mine if mine[k] != theirs[k]]
