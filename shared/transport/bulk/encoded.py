"""Chunks that travel encoded: from the pool through a codec into frames, and back."""

from collections.abc import Sequence

import torch

from shared.errors import NumericalError, TransferFailed
from shared.kernels.kv_rows import from_rows
from shared.kv.arena import KvArena
from shared.kv.codecs.codec import Codec
from shared.kv.codecs.frame import MAX_PREFIX_BYTES, CodecName, EncodedBlocks, KvShape
from shared.kv.codecs.none import NoneCodec
from shared.kv.codecs.pool import gather_tokens, scatter_tokens
from shared.kv.codecs.registry import CODEC_NAMES, make_codec
from shared.kv.layout import KvLayout
from shared.transport.bulk.plan import PlannedChunk

_PLAIN = NoneCodec()


def known_codec(name: str) -> CodecName | None:
    """Return the codec of this name, None if this build has none."""
    return next((known for known in CODEC_NAMES if known == name), None)


class EncodedChunks:
    """Encodes chunks out of one pool and decodes chunks into it, for one thread.

    That thread computes alone from its first chunk on: a team of torch's threads would wait for
    cores that the engine has.

    A chunk that the codec refuses (NaN, Inf) or cannot make smaller travels as it is, as a frame
    of the codec ``none``: whoever asked for a codec gets exact bytes instead, never an error.
    Codecs take int8 KV as bf16.
    """

    def __init__(self, arena: KvArena) -> None:
        self._arena = arena
        self._codecs: dict[CodecName, Codec] = {}
        self._alone = False

    def encode(
        self, codec: CodecName, chunk: PlannedChunk, blocks: Sequence[int], tokens: int
    ) -> list[memoryview]:
        """Return the first ``tokens`` tokens of ``blocks``, as far as in ``chunk``, encoded.

        The frames own their bytes: the pool may change as soon as this returns.
        """
        part, count, layer = self._of(chunk, blocks, tokens)
        k, v = gather_tokens(self._arena, layer, part, count)
        exact = codec == "none" or k.dtype != torch.int8
        floats = (k, v) if exact else (from_rows(k).bfloat16(), from_rows(v).bfloat16())
        try:
            encoded = self._codec(codec).encode(*floats, layer)
        except NumericalError:
            encoded = _PLAIN.encode(k, v, layer)
        if codec != "none" and len(encoded.payload) > k.nbytes + v.nbytes:
            encoded = _PLAIN.encode(k, v, layer)
        return [memoryview(encoded.prefix()), memoryview(encoded.payload)]

    def fits(self, chunk: PlannedChunk, size: int) -> bool:
        """Return whether a chunk may have so many bytes when encoded."""
        return 0 < size <= chunk.size + MAX_PREFIX_BYTES

    def decode(
        self,
        codec: CodecName,
        chunk: PlannedChunk,
        blocks: Sequence[int],
        tokens: int,
        frames: Sequence[memoryview],
        layout: KvLayout | None = None,
    ) -> None:
        """Decode verified frames and put the tokens into their blocks.

        ``layout`` is that of the pool they come from, this one's unless it differs in dtype.

        Raises:
            TransferFailed: malformed, or of another codec or other tokens than asked for.
                Nothing was written.
        """
        part, count, layer = self._of(chunk, blocks, tokens)
        encoded = EncodedBlocks.unpack(b"".join(frames))
        name = encoded.header.codec
        if name not in (codec, "none"):
            raise TransferFailed(f"KV encoded by {name!r}, expected {codec!r}")
        shape_of = KvShape.of if name == "none" else KvShape.of_floats
        expect = shape_of(layout or self._arena.layout, layer, count)
        k, v = self._codec(name).decode(encoded, expect)
        scatter_tokens(self._arena, layer, part, k, v)

    def _codec(self, name: CodecName) -> Codec:
        codec = self._codecs.get(name)
        if codec is None:
            codec = self._codecs[name] = make_codec(name, self._arena.layout)
        return codec

    def _of(
        self, chunk: PlannedChunk, blocks: Sequence[int], tokens: int
    ) -> tuple[Sequence[int], int, int]:
        """Return the blocks, tokens and layer of a chunk."""
        if not self._alone:
            # Holds for this thread, and for those that have not computed anything yet: the
            # engine's has.
            self._alone = True
            torch.set_num_threads(1)
        segment, size = chunk.segments[0], self._arena.layout.block_size
        count = min(tokens, segment.end * size) - segment.first * size
        return blocks[segment.first : segment.end], count, segment.layer
