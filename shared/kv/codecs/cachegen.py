"""``cachegen``: layer-dependent bins and an entropy code with a table per (layer, channel).

After CacheGen (arXiv 2310.07240) as its code does it: one symmetric scale per token over all
heads, uniform bins, finer in the first third of the layers than in the last, symbols coded with
their channel's own frequencies. There is no delta between tokens (the shipped code has none).
Frequencies are those of the encoded tokens and travel with them, so a payload stands alone;
they weigh little from some 256 tokens on. Where coding does not pay, bins travel as bytes.
"""

from typing import Final

import numpy as np
import torch

from shared.errors import TransferFailed
from shared.kv.codecs.frame import (
    MAX_PREFIX_BYTES,
    BinnedParameters,
    BinnedSide,
    CodecName,
    EncodedBlocks,
    KvShape,
    open_payload,
)
from shared.kv.codecs.quantise import divisor, largest_magnitude, require_finite, scale_for, to_pool
from shared.kv.codecs.sections import SectionReader, join
from shared.kv.codecs.symbols import CodedSymbols, decode_symbols, encode_symbols
from shared.kv.layout import DTYPE_BYTES, KvLayout

K_HALF: Final = (63, 47, 31)
V_HALF: Final = (15, 11, 7)
"""Bins on either side of 0 in the first, second and last third of the layers."""


class CacheGenCodec:
    """Error of an element: half its token's scale, which is max|x| of the token / half.

    Args:
        num_layers: layers of the model, for the thirds.
    """

    name: Final[CodecName] = "cachegen"

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers

    def encode(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> EncodedBlocks:
        """See ``Codec.encode``."""
        shape = KvShape.of_tensors(k, v, layer)
        require_finite(k, "K", layer)
        require_finite(v, "V", layer)
        third = min(2, layer * 3 // self._num_layers)
        k_scale, k_side, *k_parts = _encode(k, K_HALF[third])
        v_scale, v_side, *v_parts = _encode(v, V_HALF[third])
        payload = join((k_scale, v_scale, *k_parts, *v_parts))
        return EncodedBlocks.seal(self.name, shape, BinnedParameters(k_side, v_side), payload)

    def decode(self, encoded: EncodedBlocks, expect: KvShape) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Codec.decode``."""
        reader = SectionReader(open_payload(encoded, self.name, expect))
        by = encoded.header.parameters
        if not isinstance(by, BinnedParameters):
            raise TransferFailed(f"KV encoded by {self.name} without its parameters")
        tokens, heads, dtype = expect.tokens, expect.heads, expect.torch_dtype
        k_scale, v_scale = reader.take(dtype, tokens, 1), reader.take(dtype, tokens, 1)
        k_bins = _take(reader, by.k, tokens, heads * expect.k_dim)
        v_bins = _take(reader, by.v, tokens, heads * expect.v_dim)
        reader.done()
        k = to_pool(k_bins.mul_(k_scale.float()), dtype)
        v = to_pool(v_bins.mul_(v_scale.float()), dtype)
        return k.view(tokens, heads, expect.k_dim), v.view(tokens, heads, expect.v_dim)

    def worst_case_bytes(self, layout: KvLayout, tokens: int) -> int:
        """See ``Codec.worst_case_bytes``: bins as bytes."""
        scales = 2 * DTYPE_BYTES[layout.dtype]
        row = max(kv.heads * (kv.k_dim + kv.v_dim) for kv in layout.layers)
        return MAX_PREFIX_BYTES + tokens * (row + scales)


def _encode(
    values: torch.Tensor, half: int
) -> tuple[torch.Tensor, BinnedSide, torch.Tensor, torch.Tensor]:
    """Return scales [tokens, 1], how the bins are coded, table and code (or bins) as bytes."""
    rows = values.flatten(1).float()
    scale = scale_for(largest_magnitude(rows), half, values.dtype)
    bins = (rows / divisor(scale)).round_().t().to(torch.int32).contiguous()
    first, last = (int(edge) for edge in torch.aminmax(bins))
    symbols = (bins - first).numpy()
    count = last - first + 1
    coded = encode_symbols(symbols, count)
    table = torch.frombuffer(bytearray(coded.table), dtype=torch.uint8)
    words = torch.from_numpy(np.frombuffer(bytearray(coded.words.tobytes()), dtype=np.uint8))
    if len(table) + len(words) < symbols.size:
        side = BinnedSide(half, first, count, len(table), len(coded.words))
        return scale, side, table, words
    side = BinnedSide(half, first, count, 0, 0)
    return scale, side, torch.from_numpy(symbols.astype(np.uint8)), torch.empty(0)


def _take(reader: SectionReader, side: BinnedSide, tokens: int, channels: int) -> torch.Tensor:
    """Return the bins as fp32 [tokens, channels]."""
    if side.first < -side.half or side.first + side.symbols - 1 > side.half:
        raise TransferFailed("encoded KV announces more symbols than bins")
    if side.table_bytes:
        table = reader.take(torch.uint8, side.table_bytes).numpy().tobytes()
        words = np.frombuffer(
            reader.take(torch.uint8, 4 * side.words).numpy().tobytes(), dtype=np.uint32
        )
        symbols = decode_symbols(CodedSymbols(table, words), channels, tokens, side.symbols)
        bins = torch.from_numpy(symbols)
    else:
        bins = reader.take(torch.uint8, channels, tokens)
        if int(bins.max()) >= side.symbols:
            raise TransferFailed("encoded KV holds a bin outside its range")
    return (bins.t().float() + side.first).contiguous()
