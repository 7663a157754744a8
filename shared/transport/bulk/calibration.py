"""How fast this machine encodes and decodes, before any KV has told."""

import time
from typing import Final

import torch

from shared.kv.codecs.frame import KvShape
from shared.kv.codecs.planner import CodecFigures
from shared.kv.codecs.registry import make_codec
from shared.kv.layout import KvLayout
from shared.transport.bulk.rates import AUTO_CODECS

_TOKENS: Final = 256
_PASSES: Final = 2


def measure_figures(layout: KvLayout) -> tuple[CodecFigures, ...]:
    """Encode and decode 256 tokens of noise with each codec that ``auto`` may choose.

    Takes some 10 ms. The source's machine is taken to be like this one until its chunks say
    what encoding took there.
    """
    layer = max(range(len(layout.layers)), key=layout.layer_block_bytes)
    raw = KvShape.of(layout, layer, _TOKENS).raw_bytes
    shape = KvShape.of_floats(layout, layer, _TOKENS)
    dice = torch.Generator().manual_seed(1)
    k = torch.randn(_TOKENS, shape.heads, shape.k_dim, generator=dice).to(shape.torch_dtype)
    v = torch.randn(_TOKENS, shape.heads, shape.v_dim, generator=dice).to(shape.torch_dtype)
    figures = []
    for name in AUTO_CODECS:
        codec = make_codec(name, layout)
        encoding, decoding, size = [], [], 1
        for _ in range(_PASSES):
            begun = time.monotonic()
            encoded = codec.encode(k, v, layer)
            between = time.monotonic()
            codec.decode(encoded, shape)
            encoding.append(between - begun)
            decoding.append(time.monotonic() - between)
            size = encoded.nbytes
        figures.append(
            CodecFigures(
                codec=name,
                ratio=raw / size,
                encode_rate=raw / max(min(encoding), 1e-9),
                decode_rate=raw / max(min(decoding), 1e-9),
            )
        )
    return tuple(figures)
