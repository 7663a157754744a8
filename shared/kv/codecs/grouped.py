"""``k8v4`` and ``k4v4``: keys per channel, values per token, asymmetric, in groups.

As KIVI (arXiv 2402.02750), at 4 and 8 bits: a key channel has its own range over tokens, a
value has it over its token. A group of ``group`` tokens of one key channel, or of ``group``
neighbouring channels of one token's value head, shares a minimum and a step of the pool's dtype.
"""

from typing import Final, Literal

import torch

from shared.errors import BadConfig, TransferFailed
from shared.kv.codecs.frame import (
    MAX_PREFIX_BYTES,
    CodecName,
    EncodedBlocks,
    GroupedParameters,
    KvShape,
    open_payload,
)
from shared.kv.codecs.quantise import (
    decode_groups,
    encode_groups,
    group_count,
    pack_nibbles,
    packed_size,
    require_finite,
    to_pool,
    unpack_nibbles,
)
from shared.kv.codecs.sections import SectionReader, join
from shared.kv.layout import DTYPE_BYTES, KvLayout

GROUPS: Final = range(32, 65)

_TOKENS: Final = 0
_DIM: Final = 1


class GroupedCodec:
    """Error of an element: half a step, which is its group's range / (2^bits - 1).

    Args:
        name: "k8v4" or "k4v4".
        group: 32 to 64 elements; fewer are more exact and larger.

    Raises:
        BadConfig: another group.
    """

    def __init__(self, name: Literal["k8v4", "k4v4"], group: int) -> None:
        if group not in GROUPS:
            raise BadConfig(f"{name}: group is {group}, must be 32 to 64")
        self.name: CodecName = name
        self._parameters = GroupedParameters(8 if name == "k8v4" else 4, 4, group)

    def encode(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> EncodedBlocks:
        """See ``Codec.encode``."""
        shape, by = KvShape.of_tensors(k, v, layer), self._parameters
        require_finite(k, "K", layer)
        require_finite(v, "V", layer)
        keys, values = k.flatten(1).float(), v.flatten(0, 1).float()
        k_low, k_step, k_codes = encode_groups(keys, _TOKENS, by.group, by.k_bits, k.dtype)
        v_low, v_step, v_codes = encode_groups(values, _DIM, by.group, by.v_bits, v.dtype)
        codes = [_pack(k_codes, by.k_bits), _pack(v_codes, by.v_bits)]
        return EncodedBlocks.seal(
            self.name, shape, by, join((k_low, k_step, v_low, v_step, *codes))
        )

    def decode(self, encoded: EncodedBlocks, expect: KvShape) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Codec.decode``."""
        reader = SectionReader(open_payload(encoded, self.name, expect))
        by = encoded.header.parameters
        if not isinstance(by, GroupedParameters):
            raise TransferFailed(f"KV encoded by {self.name} without its parameters")
        dtype, tokens, heads = expect.torch_dtype, expect.tokens, expect.heads
        k_groups = (group_count(tokens, by.group), heads * expect.k_dim)
        v_groups = (tokens * heads, group_count(expect.v_dim, by.group))
        k_low, k_step = reader.take(dtype, *k_groups), reader.take(dtype, *k_groups)
        v_low, v_step = reader.take(dtype, *v_groups), reader.take(dtype, *v_groups)
        k_codes = _take_codes(reader, by.k_bits, tokens, heads * expect.k_dim)
        v_codes = _take_codes(reader, by.v_bits, tokens * heads, expect.v_dim)
        reader.done()
        k = decode_groups(k_low, k_step, k_codes, _TOKENS, by.group)
        v = decode_groups(v_low, v_step, v_codes, _DIM, by.group)
        return (
            to_pool(k, dtype).view(tokens, heads, expect.k_dim),
            to_pool(v, dtype).view(tokens, heads, expect.v_dim),
        )

    def worst_case_bytes(self, layout: KvLayout, tokens: int) -> int:
        """See ``Codec.worst_case_bytes``."""
        by, element = self._parameters, 2 * DTYPE_BYTES[layout.dtype]
        largest = 0
        for kv in layout.layers:
            keys, values = tokens * kv.heads * kv.k_dim, tokens * kv.heads * kv.v_dim
            groups = group_count(tokens, by.group) * kv.heads * kv.k_dim
            groups += tokens * kv.heads * group_count(kv.v_dim, by.group)
            k_bytes = keys if by.k_bits == 8 else packed_size(keys)
            largest = max(largest, groups * element + k_bytes + packed_size(values))
        return MAX_PREFIX_BYTES + largest


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return codes if bits == 8 else pack_nibbles(codes)


def _take_codes(reader: SectionReader, bits: int, rows: int, columns: int) -> torch.Tensor:
    if bits == 8:
        return reader.take(torch.uint8, rows, columns)
    count = rows * columns
    packed = reader.take(torch.uint8, packed_size(count))
    return unpack_nibbles(packed, count).view(rows, columns)
