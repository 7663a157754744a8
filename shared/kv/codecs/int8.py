"""``int8``: 8 bits per element, one symmetric scale per token and head."""

from typing import Final

import torch

from shared.kv.codecs.frame import (
    MAX_PREFIX_BYTES,
    CodecName,
    EncodedBlocks,
    KvShape,
    open_payload,
)
from shared.kv.codecs.quantise import divisor, require_finite_rows, scale_for, to_pool
from shared.kv.codecs.sections import SectionReader, join_as
from shared.kv.layout import DTYPE_BYTES, KvLayout


class Int8Codec:
    """Error of an element: half its scale, which is max|x| / 127 of its token and head."""

    name: Final[CodecName] = "int8"

    def encode(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> EncodedBlocks:
        """See ``Codec.encode``."""
        shape = KvShape.of_tensors(k, v, layer)
        k_scale, k_codes = _encode(k, "K", layer)
        v_scale, v_codes = _encode(v, "V", layer)
        sections = ((k_scale, None), (v_scale, None), (k_codes, torch.int8), (v_codes, torch.int8))
        return EncodedBlocks.seal(self.name, shape, None, join_as(sections))

    def decode(self, encoded: EncodedBlocks, expect: KvShape) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Codec.decode``."""
        reader = SectionReader(open_payload(encoded, self.name, expect))
        dtype, rows = expect.torch_dtype, (expect.tokens, expect.heads)
        k_scale, v_scale = reader.take(dtype, *rows, 1), reader.take(dtype, *rows, 1)
        k_codes = reader.take(torch.int8, *rows, expect.k_dim)
        v_codes = reader.take(torch.int8, *rows, expect.v_dim)
        reader.done()
        return _decode(k_scale, k_codes), _decode(v_scale, v_codes)

    def worst_case_bytes(self, layout: KvLayout, tokens: int) -> int:
        """See ``Codec.worst_case_bytes``."""
        scales = 2 * DTYPE_BYTES[layout.dtype]
        rows = (tokens * kv.heads * (kv.k_dim + kv.v_dim + scales) for kv in layout.layers)
        return MAX_PREFIX_BYTES + max(rows)


def _encode(values: torch.Tensor, side: str, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales in the pool's dtype and codes, still as fp32."""
    largest = require_finite_rows(values, side, layer)
    scale = scale_for(largest.float(), 127, values.dtype)
    return scale, (values.float() / divisor(scale)).round_()


def _decode(scale: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return to_pool(codes.float().mul_(scale.float()), scale.dtype)
