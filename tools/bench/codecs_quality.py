"""What a codec does to the model's next tokens: decode on from encoded and decoded KV.

Texts are prefilled once. For each codec their KV goes through ``encode`` and ``decode`` into
other blocks of the pool, and the engine reads the texts' own continuation from there, token by
token, telling its best tokens before each.
"""

import time
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shared.engine.batch import OpenSequence, SequenceInput, StepInput
from shared.engine.engine import Engine
from shared.errors import NumericalError
from shared.kv.arena import KvArena
from shared.kv.codecs.codec import Codec
from shared.kv.codecs.frame import EncodedBlocks, KvShape
from shared.kv.codecs.pool import gather_tokens, scatter_tokens
from shared.messages.request import Sampling

_BEST = 512


class Transfer(Struct, frozen=True, kw_only=True):
    """Bytes before and after, over all layers of all texts.

    ``seconds`` [encoded chunks, 2] of encoding and decoding each.
    """

    raw_bytes: int
    encoded_bytes: int
    seconds: NDArray[np.float64]


class Difference(Struct, frozen=True, kw_only=True):
    """Next-token distributions against those from the pool's own KV.

    ``kl`` is Kullback-Leibler(reference, codec) in nats per position, over the tokens that are
    among the best of both and all others as one: at most the full one, and close to it.
    """

    positions: int
    top1: float
    kl_mean: float
    kl_max: float


class BestTokens(Struct, frozen=True):
    """Of each position the best tokens and their log probabilities, [positions, best]."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float64]


class Continuations:
    """Texts prefilled in ``engine``; each is ``prompt`` tokens and then the continuation.

    Args:
        engine: gets an arena of its own attached, see ``close``.
        texts: token ids, all equally long and longer than ``prompt``.
        prompt: tokens of each text whose KV is encoded.
        chunk: tokens encoded at a time.
    """

    def __init__(
        self, engine: Engine, texts: Sequence[Sequence[int]], prompt: int, chunk: int
    ) -> None:
        self._engine = engine
        self._texts = [tuple(text) for text in texts]
        self._prompt = prompt
        self._chunk = chunk
        self._blocks = -(-len(self._texts[0]) // engine.layout.block_size)
        self._arena = KvArena.create(engine.layout, 2 * self._blocks * len(texts))
        engine.attach(self._arena)
        for index, text in enumerate(self._texts):
            part = SequenceInput(index, text[:prompt], 0, self._table(index), False)
            engine.step(StepInput(sequences=(part,)))

    def close(self) -> None:
        """Give the arena back; the engine must not step any more."""
        self._arena.close()

    def transfer(self, codec: Codec) -> Transfer:
        """Take all KV through ``codec`` to where ``continue_texts`` reads it."""
        raw = encoded_bytes = 0
        seconds = []
        layout = self._engine.layout
        owners = [i for i, layer in enumerate(layout.layers) if layer.shares is None]
        for index in range(len(self._texts)):
            source, target = self._table(index), self._table(index + len(self._texts))
            for layer in owners:
                for start in range(0, self._prompt, self._chunk):
                    tokens = min(self._chunk, self._prompt - start)
                    low = start // layout.block_size
                    k, v = gather_tokens(self._arena, layer, source[low:], tokens)
                    begun = time.perf_counter()
                    frame = codec.encode(k, v, layer).pack()
                    encoded = time.perf_counter()
                    shape = KvShape.of(layout, layer, tokens)
                    k, v = codec.decode(EncodedBlocks.unpack(frame), shape)
                    seconds.append((encoded - begun, time.perf_counter() - encoded))
                    scatter_tokens(self._arena, layer, target[low:], k, v)
                    raw += shape.raw_bytes
                    encoded_bytes += len(frame)
        return Transfer(raw_bytes=raw, encoded_bytes=encoded_bytes, seconds=np.array(seconds))

    def continue_texts(self) -> BestTokens:
        """Read the continuations on what ``transfer`` left; all positions of all texts.

        Raises:
            NumericalError: the model's logits are not finite.
        """
        sampling = Sampling(seed=0, max_tokens=len(self._texts[0]), temperature=0.0, logprobs=_BEST)
        keys = range(len(self._texts))
        opened = tuple(OpenSequence(i, sampling, self._texts[i][: self._prompt]) for i in keys)
        best = []
        for position in range(self._prompt, len(self._texts[0])):
            parts = tuple(
                SequenceInput(
                    i, (self._texts[i][position],), position, self._table(i + len(keys)), True
                )
                for i in keys
            )
            result = self._engine.step(StepInput(opened, (), parts))
            opened = ()
            if result.failed:
                raise NumericalError(result.failed[0][1].message)
            best += [s.logprob.top for s in result.sampled if s.logprob is not None]
        self._engine.step(StepInput(closed=tuple(keys)))
        table = np.array(best, dtype=np.float64)
        return BestTokens(table[:, :, 0].astype(np.int64), table[:, :, 1])

    def _table(self, slot: int) -> tuple[int, ...]:
        return tuple(range(slot * self._blocks, (slot + 1) * self._blocks))


def compare(reference: BestTokens, other: BestTokens) -> Difference:
    """Compare next-token distributions position by position."""
    rows = zip(reference.tokens, reference.logprobs, other.tokens, other.logprobs, strict=True)
    kl = np.array([_divergence(*row) for row in rows])
    return Difference(
        positions=len(kl),
        top1=float((reference.tokens[:, 0] == other.tokens[:, 0]).mean()),
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
    )


def _divergence(
    tokens: NDArray[np.int64],
    logprobs: NDArray[np.float64],
    other_tokens: NDArray[np.int64],
    other_logprobs: NDArray[np.float64],
) -> float:
    _, mine, theirs = np.intersect1d(tokens, other_tokens, return_indices=True)
    log_p, log_q = logprobs[mine], other_logprobs[theirs]
    p_rest = max(1 - float(np.exp(log_p).sum()), 1e-12)
    q_rest = max(1 - float(np.exp(log_q).sum()), 1e-12)
    common = float((np.exp(log_p) * (log_p - log_q)).sum())
    return max(0.0, common + p_rest * float(np.log(p_rest / q_rest)))
