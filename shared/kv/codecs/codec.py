"""The one interface of all codecs."""

from typing import Protocol

import torch

from shared.kv.codecs.frame import CodecName, EncodedBlocks, KvShape
from shared.kv.layout import KvLayout


class Codec(Protocol):
    """Encodes K and V of some tokens of one layer, and decodes them again.

    Equal input gives equal bytes. ``decode`` either returns what ``encode`` wrote, within the
    codec's own error, or raises.
    """

    @property
    def name(self) -> CodecName:
        """The codec's name, also in every header."""
        ...

    def encode(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> EncodedBlocks:
        """Encode ``k`` [tokens, heads, k_dim] and ``v`` [tokens, heads, v_dim] of ``layer``.

        Raises:
            NumericalError: a lossy codec met NaN, Inf or more than 1e38.
            ValueError: the tensors are no KV of one layer.
        """
        ...

    def decode(self, encoded: EncodedBlocks, expect: KvShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V, contiguous, owned by the caller, in ``expect``'s dtype and shape.

        Raises:
            TransferFailed: the bytes are damaged, truncated, malformed, of another codec, or
                of other tokens than expected.
        """
        ...

    def worst_case_bytes(self, layout: KvLayout, tokens: int) -> int:
        """Return a bound on ``EncodedBlocks.nbytes`` of ``tokens`` tokens of any one layer."""
        ...
