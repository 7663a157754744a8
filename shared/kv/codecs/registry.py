"""Codecs by name, with their defaults."""

from typing import Final, get_args

from shared.errors import BadConfig
from shared.kv.codecs.cachegen import CacheGenCodec
from shared.kv.codecs.codec import Codec
from shared.kv.codecs.frame import CodecName
from shared.kv.codecs.grouped import GroupedCodec
from shared.kv.codecs.int8 import Int8Codec
from shared.kv.codecs.none import NoneCodec
from shared.kv.codecs.sparse import SparseCodec
from shared.kv.layout import KvLayout

CODEC_NAMES: Final[tuple[CodecName, ...]] = get_args(CodecName)

_SPARSE_KEEP: Final = 0.5


def make_codec(name: CodecName, layout: KvLayout) -> Codec:
    """Return the codec with its default settings for pools of this layout.

    Raises:
        BadConfig: there is no such codec.
    """
    match name:
        case "none":
            return NoneCodec()
        case "int8":
            return Int8Codec()
        case "k8v4":
            return GroupedCodec("k8v4", 64)
        case "k4v4":
            return GroupedCodec("k4v4", 32)
        case "cachegen":
            return CacheGenCodec(len(layout.layers))
        case "sparse":
            return SparseCodec(_SPARSE_KEEP, layout.block_size)
    raise BadConfig(f"no codec {name!r}, only {', '.join(CODEC_NAMES)}")
