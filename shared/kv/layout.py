"""What one block of KV looks like: sizes, dtype and which layers own storage."""

import hashlib
from typing import Final, Literal

import msgspec
from msgspec import Struct

from shared.errors import UnsupportedModel

KvDtype = Literal["fp32", "bf16", "fp16", "int8", "fp8"]

DTYPE_BYTES: Final[dict[KvDtype, int]] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}
SCALED: Final[tuple[KvDtype, ...]] = ("int8", "fp8")
"""KV of one byte an element, with a scale."""
SCALE_BYTES: Final = 4
"""Behind the elements of one token's K or V of one head: their fp32 scale."""

_ARRANGEMENT = "block,token,head,dim/1"
_MAX_INTEGER_DIM: Final = 2048
"""More of an int8 key would overflow the 32 bits in which its products are added."""


class LayerKv(Struct, frozen=True):
    """KV of one attention layer: ``heads`` KV heads of ``k_dim`` and ``v_dim`` elements.

    ``window`` is the sliding window in tokens, None where all tokens are attended to.
    ``shares`` is the index of an earlier layer whose KV this one reads: no own storage.
    """

    heads: int
    k_dim: int
    v_dim: int
    window: int | None = None
    shares: int | None = None


class KvLayout(Struct, frozen=True, kw_only=True):
    """Shape of the KV of one model at one block size and dtype.

    Raises:
        UnsupportedModel: a size is not positive, or a layer shares what it cannot share.
    """

    dtype: KvDtype
    block_size: int
    layers: tuple[LayerKv, ...]

    def __post_init__(self) -> None:
        if self.block_size < 1 or not self.layers:
            raise UnsupportedModel("a KV layout needs a block size >= 1 and at least one layer")
        for index, layer in enumerate(self.layers):
            if min(layer.heads, layer.k_dim, layer.v_dim) < 1:
                raise UnsupportedModel(f"layer {index}: heads, k_dim and v_dim must be >= 1")
            if self.dtype == "int8" and layer.k_dim > _MAX_INTEGER_DIM:
                raise UnsupportedModel(
                    f"layer {index}: `kv_dtype: int8` takes keys of up to {_MAX_INTEGER_DIM} "
                    f"elements, and these have {layer.k_dim}; use bf16 or fp16"
                )
            if self.dtype == "fp8" and (layer.k_dim % 4 or layer.v_dim % 4):
                raise UnsupportedModel(
                    f"layer {index}: `kv_dtype: fp8` takes heads whose width is a multiple of 4, "
                    f"and these have {layer.k_dim} and {layer.v_dim}; use bf16 or fp16"
                )
            if layer.window is not None and layer.window < 1:
                raise UnsupportedModel(f"layer {index}: window must be >= 1 or absent")
            if layer.shares is not None:
                self._check_shared(index, layer)

    def _check_shared(self, index: int, layer: LayerKv) -> None:
        owner = layer.shares
        if owner is None or not 0 <= owner < index or self.layers[owner].shares is not None:
            raise UnsupportedModel(
                f"layer {index}: shares={owner} must be an earlier layer with own storage"
            )
        theirs = self.layers[owner]
        if (theirs.heads, theirs.k_dim, theirs.v_dim) != (layer.heads, layer.k_dim, layer.v_dim):
            raise UnsupportedModel(f"layer {index}: shape differs from layer {owner} it shares")

    def fingerprint(self) -> str:
        """Return 32 hex digits, equal exactly where blocks may be copied byte by byte."""
        content = _ARRANGEMENT.encode() + msgspec.json.encode(self)
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def shape_fingerprint(self) -> str:
        """Return 32 hex digits, equal exactly where layouts differ in dtype at most."""
        return self.with_dtype("fp32").fingerprint()

    def with_dtype(self, dtype: KvDtype | None) -> "KvLayout":
        """Return the layout of the same KV in another dtype; None: in this one."""
        return self if dtype is None else msgspec.structs.replace(self, dtype=dtype)

    def owner(self, layer: int) -> int:
        """Return the layer that stores the KV of ``layer``: itself unless it shares."""
        shares = self.layers[layer].shares
        return layer if shares is None else shares

    def width(self, dim: int) -> int:
        """Return how many elements a pool has for ``dim`` of a head: a scale takes four."""
        return dim + SCALE_BYTES if self.dtype in SCALED else dim

    def k_block_bytes(self, layer: int) -> int:
        """Return the bytes of one block's K in the storage ``layer`` reads from."""
        kv = self.layers[layer]
        return self.block_size * kv.heads * self.width(kv.k_dim) * DTYPE_BYTES[self.dtype]

    def v_block_bytes(self, layer: int) -> int:
        """Return the bytes of one block's V in the storage ``layer`` reads from."""
        kv = self.layers[layer]
        return self.block_size * kv.heads * self.width(kv.v_dim) * DTYPE_BYTES[self.dtype]

    def layer_block_bytes(self, layer: int) -> int:
        """Return the bytes ``layer`` itself stores per block, K and V; 0 where it shares."""
        if self.layers[layer].shares is not None:
            return 0
        return self.k_block_bytes(layer) + self.v_block_bytes(layer)

    @property
    def token_bytes(self) -> tuple[int, ...]:
        """Bytes that each layer stores per token."""
        return tuple(self.layer_block_bytes(i) // self.block_size for i in range(len(self.layers)))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(self.layer_block_bytes(i) for i in range(len(self.layers)))

    def sequence_bytes(self, tokens: int) -> int:
        """Return the bytes of the blocks that hold a sequence of ``tokens``."""
        return -(-tokens // self.block_size) * self.block_bytes
