"""``sparse``: the most important blocks of tokens whole, of the others one mean token.

This loses in another way than quantisation: tokens that matter late, to a query nobody has
asked yet, become their block's average, and no bound on a single element holds. It is for
measuring and for opting in, never chosen by itself.

Which blocks matter is guessed per layer from keys alone: the newest keys stand in for queries,
and a block's importance is the attention they would pay it. The first block (attention sinks)
and the last two are always whole. A dropped block keeps its mean key and value, in every one of
its places: without them the missing softmax mass ruins the model (measured in docs/codecs.md).
"""

import math
from typing import Final

import numpy as np
import torch

from shared.errors import BadConfig, TransferFailed
from shared.kv.codecs.frame import (
    MAX_PREFIX_BYTES,
    CodecName,
    EncodedBlocks,
    KvShape,
    SparseParameters,
    open_payload,
)
from shared.kv.codecs.quantise import group_count, require_finite, to_pool
from shared.kv.codecs.sections import SectionReader, join
from shared.kv.layout import KvLayout

_QUERIES: Final = 32
_NEWEST_BLOCKS: Final = 2


class SparseCodec:
    """Tokens of kept blocks are bit-exact, each other token is its block's mean.

    Args:
        keep: share of the blocks kept whole, above 0, at most 1.
        block: tokens per block.

    Raises:
        BadConfig: another share.
    """

    name: Final[CodecName] = "sparse"

    def __init__(self, keep: float, block: int) -> None:
        if not 0 < keep <= 1:
            raise BadConfig(f"sparse: keep is {keep}, must be above 0 and at most 1")
        self._keep = keep
        self._block = block

    def encode(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> EncodedBlocks:
        """See ``Codec.encode``."""
        shape = KvShape.of_tensors(k, v, layer)
        require_finite(k, "K", layer)
        require_finite(v, "V", layer)
        kept = self._choose(k)
        whole = _per_token(kept, self._block, shape.tokens)
        parts = [k[whole], v[whole], _means(k, kept, self._block), _means(v, kept, self._block)]
        bitmap = torch.from_numpy(np.packbits(kept.numpy()))
        parameters = SparseParameters(self._block, int(kept.sum()))
        return EncodedBlocks.seal(self.name, shape, parameters, join((*parts, bitmap)))

    def decode(self, encoded: EncodedBlocks, expect: KvShape) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Codec.decode``."""
        payload = open_payload(encoded, self.name, expect)
        by = encoded.header.parameters
        if not isinstance(by, SparseParameters):
            raise TransferFailed(f"KV encoded by {self.name} without its parameters")
        blocks = group_count(expect.tokens, by.block)
        kept = _read_bitmap(payload, blocks)
        if int(kept.sum()) != by.kept or not bool(kept[-1]):
            raise TransferFailed("encoded KV contradicts itself on the blocks it keeps")
        whole = _per_token(kept, by.block, expect.tokens)
        reader, dtype, heads = SectionReader(payload), expect.torch_dtype, expect.heads
        tokens, dropped = int(whole.sum()), blocks - by.kept
        k_whole = reader.take(dtype, tokens, heads, expect.k_dim)
        v_whole = reader.take(dtype, tokens, heads, expect.v_dim)
        k_mean = reader.take(dtype, dropped, heads, expect.k_dim)
        v_mean = reader.take(dtype, dropped, heads, expect.v_dim)
        reader.take(torch.uint8, group_count(blocks, 8))
        reader.done()
        return _merge(k_whole, k_mean, whole, by.block), _merge(v_whole, v_mean, whole, by.block)

    def worst_case_bytes(self, layout: KvLayout, tokens: int) -> int:
        """See ``Codec.worst_case_bytes``: all blocks kept."""
        raw = max(KvShape.of(layout, i, tokens).raw_bytes for i in range(len(layout.layers)))
        return MAX_PREFIX_BYTES + raw + group_count(group_count(tokens, self._block), 8)

    def _choose(self, k: torch.Tensor) -> torch.Tensor:
        """Return which blocks are kept, bool [blocks]."""
        tokens, blocks = k.shape[0], group_count(k.shape[0], self._block)
        attention = _stand_in_attention(k.float())
        importance = torch.zeros(blocks).index_add_(
            0, torch.arange(tokens) // self._block, attention
        )
        importance[0] = math.inf
        importance[-_NEWEST_BLOCKS:] = math.inf
        count = max(math.ceil(self._keep * blocks), min(blocks, _NEWEST_BLOCKS + 1))
        kept = torch.zeros(blocks, dtype=torch.bool)
        kept[torch.argsort(importance, descending=True, stable=True)[:count]] = True
        return kept


def _stand_in_attention(k: torch.Tensor) -> torch.Tensor:
    """Return the attention [tokens] that the newest keys, taken as queries, pay in sum."""
    keys = k * (1e9 / k.abs().amax()).clamp_max(1.0)  # scores of absurd keys stay finite
    queries = keys[-_QUERIES:] / math.sqrt(k.shape[2])
    scores = torch.einsum("qhd,thd->hqt", queries, keys)
    return torch.softmax(scores, dim=-1).sum(dim=(0, 1))


def _per_token(kept: torch.Tensor, block: int, tokens: int) -> torch.Tensor:
    return kept.repeat_interleave(block)[:tokens]


def _means(values: torch.Tensor, kept: torch.Tensor, block: int) -> torch.Tensor:
    """Return the means [dropped, heads, dim] of dropped blocks, all of which are full."""
    dropped = ~_per_token(kept, block, values.shape[0])
    # In fp32 the sum of the largest overflows, and quotients of the smallest are zeros.
    blocks = values[dropped].double().view(-1, block, *values.shape[1:])
    return to_pool(blocks.mean(dim=1).float(), values.dtype)


def _merge(
    kept: torch.Tensor, means: torch.Tensor, whole: torch.Tensor, block: int
) -> torch.Tensor:
    merged = kept.new_empty((len(whole), *kept.shape[1:]))
    merged[whole] = kept
    merged[~whole] = means.repeat_interleave(block, dim=0)
    return merged


def _read_bitmap(payload: torch.Tensor, blocks: int) -> torch.Tensor:
    size = group_count(blocks, 8)
    if len(payload) < size:
        raise TransferFailed(f"encoded KV has {len(payload)} payload bytes, needs at least {size}")
    bits = np.unpackbits(payload[len(payload) - size :].numpy(), count=blocks)
    return torch.from_numpy(bits).to(torch.bool)
