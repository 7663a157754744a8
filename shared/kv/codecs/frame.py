"""Encoded KV of one layer: a header that says all about itself, a payload, one checksum.

On the wire: magic (4 bytes), version (u16), header length (u32), header (msgpack), payload. The
checksum in the header covers header and payload, so a damaged byte anywhere is found before
anything is decoded.
"""

import struct
from typing import Annotated, Final, Literal

import msgspec
import torch
import xxhash
from msgspec import Meta, Struct

from shared.errors import TransferFailed
from shared.kv.dtypes import TORCH_DTYPES
from shared.kv.layout import DTYPE_BYTES, KvDtype, KvLayout

CodecName = Literal["none", "int8", "k8v4", "k4v4", "cachegen", "sparse"]
FRAME_VERSION: Final = 1

_DTYPE_NAMES: Final[dict[torch.dtype, KvDtype]] = {t: name for name, t in TORCH_DTYPES.items()}

_MAGIC: Final = b"DKVC"
_PREFIX: Final = struct.Struct("<4sHI")
_MAX_HEADER: Final = 1024
MAX_PREFIX_BYTES: Final = _PREFIX.size + _MAX_HEADER
"""A bound on what goes before the payload."""

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Size = Annotated[int, Meta(ge=0, le=2**47)]
Checksum = Annotated[bytes, Meta(min_length=8, max_length=8)]


class KvShape(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which KV: ``tokens`` consecutive tokens of layer ``layer``.

    K is [tokens, heads, k_dim], V is [tokens, heads, v_dim], both of ``dtype``. The dims of int8
    are the pool's: its scales are counted in.
    """

    layer: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    dtype: KvDtype
    tokens: Count
    heads: Count
    k_dim: Count
    v_dim: Count

    @classmethod
    def of(cls, layout: KvLayout, layer: int, tokens: int) -> "KvShape":
        """Return the shape of ``tokens`` tokens of ``layer`` in a pool of this layout."""
        kv = layout.layers[layer]
        return cls(
            layer=layer,
            dtype=layout.dtype,
            tokens=tokens,
            heads=kv.heads,
            k_dim=layout.width(kv.k_dim),
            v_dim=layout.width(kv.v_dim),
        )

    @classmethod
    def of_floats(cls, layout: KvLayout, layer: int, tokens: int) -> "KvShape":
        """Return the shape in which a lossy codec takes and gives them: int8 as bf16."""
        floats = layout.with_dtype("bf16") if layout.dtype == "int8" else layout
        return cls.of(floats, layer, tokens)

    @classmethod
    def of_tensors(cls, k: torch.Tensor, v: torch.Tensor, layer: int) -> "KvShape":
        """Return the shape of these tensors.

        Raises:
            ValueError: not [tokens, heads, dim] with equal tokens and heads, an empty axis, or
                a dtype no pool has.
        """
        if k.dim() != 3 or v.dim() != 3 or k.shape[:2] != v.shape[:2] or k.dtype != v.dtype:
            raise ValueError(f"K {tuple(k.shape)} and V {tuple(v.shape)} do not belong together")
        if k.dtype not in _DTYPE_NAMES or not k.numel() or not v.numel():
            raise ValueError(f"no KV of {k.dtype} with K {tuple(k.shape)}, V {tuple(v.shape)}")
        return cls(
            layer=layer,
            dtype=_DTYPE_NAMES[k.dtype],
            tokens=k.shape[0],
            heads=k.shape[1],
            k_dim=k.shape[2],
            v_dim=v.shape[2],
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of K and V."""
        return TORCH_DTYPES[self.dtype]

    @property
    def raw_bytes(self) -> int:
        """Bytes of K and V as the pool holds them."""
        return self.tokens * self.heads * (self.k_dim + self.v_dim) * DTYPE_BYTES[self.dtype]


class GroupedParameters(Struct, frozen=True, tag="grouped", forbid_unknown_fields=True):
    """``k_bits``/``v_bits`` per element, ``group`` elements share a minimum and a step."""

    k_bits: Literal[4, 8]
    v_bits: Literal[4, 8]
    group: Annotated[int, Meta(ge=1, le=65536)]


class BinnedSide(Struct, frozen=True, forbid_unknown_fields=True):
    """K or V in bins -``half`` … ``half``, of which ``symbols`` from ``first`` on occur.

    ``table_bytes`` of compressed frequencies and ``words`` of coded symbols follow in the
    payload; without a table the symbols lie there one per byte.
    """

    half: Annotated[int, Meta(ge=1, le=127)]
    first: Annotated[int, Meta(ge=-127, le=127)]
    symbols: Annotated[int, Meta(ge=1, le=255)]
    table_bytes: Size
    words: Size


class BinnedParameters(Struct, frozen=True, tag="binned", forbid_unknown_fields=True):
    """Bins and coding of both sides."""

    k: BinnedSide
    v: BinnedSide


class SparseParameters(Struct, frozen=True, tag="sparse", forbid_unknown_fields=True):
    """``kept`` of the blocks of ``block`` tokens are whole; the others are one mean token."""

    block: Annotated[int, Meta(ge=1, le=65536)]
    kept: Count


_UNSEALED: Final = bytes(8)

Parameters = GroupedParameters | BinnedParameters | SparseParameters


class CodecHeader(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything ``decode`` needs.

    ``checksum`` is XXH3-64 over this header with a checksum of zeros, then the payload.
    """

    codec: CodecName
    shape: KvShape
    parameters: Parameters | None
    payload_bytes: Size
    checksum: Checksum = _UNSEALED


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(CodecHeader)


class EncodedBlocks(Struct, frozen=True):
    """Encoded KV of some tokens of one layer."""

    header: CodecHeader
    payload: bytes | bytearray | memoryview

    @classmethod
    def seal(
        cls,
        codec: CodecName,
        shape: KvShape,
        parameters: Parameters | None,
        payload: bytearray,
    ) -> "EncodedBlocks":
        """Put a header with the right length and checksum before ``payload``."""
        header = CodecHeader(
            codec=codec, shape=shape, parameters=parameters, payload_bytes=len(payload)
        )
        checksum = _checksum(header, payload)
        return cls(msgspec.structs.replace(header, checksum=checksum), payload)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire: prefix, header and payload."""
        return len(self.prefix()) + len(self.payload)

    def prefix(self) -> bytes:
        """Return what goes before the payload, for senders that send without joining."""
        header = _ENCODER.encode(self.header)
        return _PREFIX.pack(_MAGIC, FRAME_VERSION, len(header)) + header

    def pack(self) -> bytes:
        """Return prefix, header and payload in one piece."""
        return self.prefix() + self.payload

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> "EncodedBlocks":
        """Read what ``pack`` wrote, without copying the payload.

        The checksum is verified by ``open_payload``, which every ``decode`` begins with.

        Raises:
            TransferFailed: not such bytes, another version, truncated, or too long.
        """
        view = memoryview(data).cast("B")
        if len(view) < _PREFIX.size:
            raise TransferFailed(f"encoded KV of {len(view)} bytes is truncated")
        magic, version, size = _PREFIX.unpack_from(view)
        if magic != _MAGIC:
            raise TransferFailed("these bytes are not encoded KV (bad magic)")
        if version != FRAME_VERSION:
            raise TransferFailed(f"encoded KV of version {version}, this reads {FRAME_VERSION}")
        if size > _MAX_HEADER or _PREFIX.size + size > len(view):
            raise TransferFailed("the header of encoded KV is truncated or malformed")
        try:
            header = _DECODER.decode(view[_PREFIX.size : _PREFIX.size + size])
        except msgspec.DecodeError as error:
            raise TransferFailed(f"the header of encoded KV is malformed: {error}") from error
        payload = view[_PREFIX.size + size :]
        if len(payload) != header.payload_bytes:
            raise TransferFailed(
                f"encoded KV has {len(payload)} payload bytes, announced {header.payload_bytes}"
            )
        return cls(header, payload)


def open_payload(encoded: EncodedBlocks, codec: CodecName, expect: KvShape) -> torch.Tensor:
    """Return an own copy of the payload, uint8, once everything about it is verified.

    The checksum is taken of the copy: a sender that still writes cannot slip past it.

    Raises:
        TransferFailed: another codec or shape than expected, truncated, or damaged.
    """
    header = encoded.header
    if header.codec != codec:
        raise TransferFailed(f"KV encoded by {header.codec!r}, expected {codec!r}")
    for field in KvShape.__struct_fields__:
        got, want = getattr(header.shape, field), getattr(expect, field)
        if got != want:
            raise TransferFailed(f"encoded KV: {field} is {got!r}, expected {want!r}")
    if len(encoded.payload) != header.payload_bytes:
        raise TransferFailed(
            f"encoded KV has {len(encoded.payload)} payload bytes, announced {header.payload_bytes}"
        )
    payload = bytearray(encoded.payload)
    if not payload or _checksum(header, payload) != header.checksum:
        raise TransferFailed(f"encoded KV of layer {header.shape.layer} is damaged (checksum)")
    return torch.frombuffer(payload, dtype=torch.uint8)


def _checksum(header: CodecHeader, payload: bytearray) -> bytes:
    digest = xxhash.xxh3_64(_ENCODER.encode(msgspec.structs.replace(header, checksum=_UNSEALED)))
    digest.update(payload)
    return digest.digest()
