"""``none``: the pool's bytes as they are."""

from typing import Final

import torch

from shared.kv.codecs.frame import MAX_PREFIX_BYTES, CodecName, EncodedBlocks, KvShape, open_payload
from shared.kv.codecs.sections import SectionReader, join
from shared.kv.layout import KvLayout


class NoneCodec:
    """Bit-exact, NaN included; see ``Codec``."""

    name: Final[CodecName] = "none"

    def encode(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> EncodedBlocks:
        """See ``Codec.encode``."""
        shape = KvShape.of_tensors(k, v, layer)
        return EncodedBlocks.seal(self.name, shape, None, join((k, v)))

    def decode(self, encoded: EncodedBlocks, expect: KvShape) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Codec.decode``."""
        reader = SectionReader(open_payload(encoded, self.name, expect))
        k = reader.take(expect.torch_dtype, expect.tokens, expect.heads, expect.k_dim)
        v = reader.take(expect.torch_dtype, expect.tokens, expect.heads, expect.v_dim)
        reader.done()
        return k, v

    def worst_case_bytes(self, layout: KvLayout, tokens: int) -> int:
        """See ``Codec.worst_case_bytes``."""
        shapes = [KvShape.of(layout, layer, tokens) for layer in range(len(layout.layers))]
        return MAX_PREFIX_BYTES + max(shape.raw_bytes for shape in shapes)
