"""The first message on every link: who speaks, and whether the two sides fit together."""

from collections.abc import Iterable
from typing import Annotated, Final, get_args

from msgspec import Meta, Struct

from shared.kv.layout import KvDtype, LayerKv

WIRE_VERSION = 1

CONVERTIBLE: Final[frozenset[KvDtype]] = frozenset(get_args(KvDtype)) - {"fp8"}
"""Readers on CPUs convert between these; fp8 is in GPUs' memory on both sides."""


class Compatibility(Struct, frozen=True, kw_only=True):
    """Everything two workers must share before one may read the other's KV.

    ``model`` identifies weights and tokenizer, ``layout`` is ``KvLayout.shape_fingerprint()``
    and ``layers`` what it was made of, to name what differs (empty: not told).
    ``tensor_parallel`` is over how many ranks the KV heads are split, 1 in this version.
    ``kv_dtype`` may differ where this version converts both, as the reader does. One of a later
    version is no malformed message: it is a string here.
    """

    wire_version: int = WIRE_VERSION
    model: str
    kv_dtype: str
    block_size: int
    layout: str
    tensor_parallel: int = 1
    layers: tuple[LayerKv, ...] = ()

    def differences(self, other: "Compatibility") -> list[str]:
        """Name the fields that keep ``other`` from fitting, with both values.

        Of two versions nothing else is compared: the fields of the other one may mean anything.
        """
        if self.wire_version != other.wire_version:
            return [two_versions(self.wire_version, other.wire_version)]
        converted = {self.kv_dtype, other.kv_dtype} <= CONVERTIBLE
        named = ("model", *(() if converted else ("kv_dtype",)), "block_size", "tensor_parallel")
        found = _unequal(self, other, named)
        if self.layout != other.layout:
            told = bool(self.layers and other.layers)
            shape = _layer_differences(self.layers, other.layers) if told else []
            # A layout depends on the block size, too, and two hashes say nothing of use.
            explained = shape or (told and self.block_size != other.block_size)
            found += shape if explained else _unequal(self, other, ("layout",))
        return found


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


def _unequal(mine: Struct, theirs: Struct, fields: Iterable[str]) -> list[str]:
    pairs = [(name, getattr(mine, name), getattr(theirs, name)) for name in fields]
    return [f"{name}: {a!r} here, {b!r} there" for name, a, b in pairs if a != b]


def _layer_differences(mine: tuple[LayerKv, ...], theirs: tuple[LayerKv, ...]) -> list[str]:
    """Name what differs between the KV of two models, each field once."""
    if len(mine) != len(theirs):
        return [f"layers: {len(mine)} here, {len(theirs)} there"]
    found = []
    for field in LayerKv.__struct_fields__:
        pairs = zip(mine, theirs, strict=True)
        lines = [(layer, _unequal(a, b, (field,))) for layer, (a, b) in enumerate(pairs)]
        unequal = [(layer, line[0]) for layer, line in lines if line]
        if unequal:
            first, text = unequal[0]
            more = f" and {len(unequal) - 1} more" if len(unequal) > 1 else ""
            found.append(f"{text} (layer {first}{more})")
    return found


def two_versions(mine: int, theirs: int) -> str:
    """Return the sentence part for a peer of another wire version."""
    return f"wire_version: {mine} here, {theirs} there; install the same release on both sides"
