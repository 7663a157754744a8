"""Encoded KV on real sockets: what arrives, what harm does to it, and what never gets through."""

import queue
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
import zmq
from msgspec.structs import replace

from shared.fault_rules import ChunkFault, FaultsSection
from shared.kv.arena import KvArena
from shared.kv.codecs.frame import CodecName, EncodedBlocks
from shared.kv.codecs.none import NoneCodec
from shared.kv.codecs.registry import CODEC_NAMES, make_codec
from shared.kv.layout import KvLayout, LayerKv
from shared.transport.bulk.encoded import EncodedChunks
from shared.transport.bulk.fetches import Failed, FetchLimits
from shared.transport.bulk.plan import PlannedChunk
from shared.transport.bulk.reader import (
    Fetched,
    FetchJob,
    HostReader,
    Opened,
    Outcome,
    ReaderLimits,
)
from shared.transport.bulk.server import HostServer
from shared.transport.bulk.source_link import Peer
from shared.units import Seconds
from shared.worker.events import SourceKey
from tests.conftest import RunAsync
from tests.transport.harness import Context
from tests.transport.kv_filling import fill_normal
from tests.transport.test_bulk_link import (
    BLOCKS,
    CALM,
    DEADLINE,
    FAST,
    LAYOUT,
    MENDING,
    SOURCE,
    Ends,
)

TOKENS = 30  # of the 32 in 8 blocks: the last block is not full
CHUNKS = 12  # of 3 layers, 8 blocks of 256 bytes (K and V) cut at 700
LOSSY = tuple(name for name in CODEC_NAMES if name != "none")


def ends_for(context: Context, codec: CodecName, limits: FetchLimits = FAST) -> Ends:
    ends = Ends(context, limits)
    ends.codec = codec
    fill_normal(ends.source, 1)
    fill_normal(ends.target, 2)
    return ends


@pytest.fixture
def ends(context: Context) -> Iterator[Ends]:
    pair = ends_for(context, "int8")
    yield pair
    pair.close()


def error_of(ends: Ends) -> float:
    """Return the largest difference over all tokens that were asked for."""
    worst = 0.0
    for layer in range(len(LAYOUT.layers)):
        for name in ("k", "v"):
            theirs = getattr(ends.source, name)(layer)[:8].flatten(0, 1)[:TOKENS]
            ours = getattr(ends.target, name)(layer)[8:16].flatten(0, 1)[:TOKENS]
            worst = max(worst, float((theirs.float() - ours.float()).abs().max()))
    return worst


@pytest.mark.parametrize("sockets", [1, 3])
@pytest.mark.parametrize("codec", LOSSY)
def test_every_codec_brings_the_kv_and_nothing_else(
    context: Context, codec: CodecName, sockets: int
) -> None:
    """Guards tokens of others in the last block, and chunks that overwrite neighbours (32, 37)."""
    ends = ends_for(context, codec, replace(CALM, sockets=sockets))
    before = [part.copy() for layer in range(3) for part in ends.target.raw(layer)]
    assert ends.open(ends.serve()).error is None
    outcome = ends.fetch(tokens=TOKENS)
    assert isinstance(outcome, Fetched) and outcome.codec == codec and outcome.again == 0
    assert outcome.bytes == 8 * LAYOUT.block_bytes
    assert outcome.wire > 0
    # The bound of one token in 4 bits; ``sparse`` replaces whole tokens by their mean.
    assert error_of(ends) < (0.05 if codec == "int8" else 8.0 if codec == "sparse" else 0.5)
    after = [part for layer in range(3) for part in ends.target.raw(layer)]
    rest = [b for b in range(BLOCKS) if not 8 <= b < 16]
    assert all(np.array_equal(x[rest], y[rest]) for x, y in zip(before, after, strict=True))
    tail = [part.reshape(BLOCKS, 4, -1)[15, 2:] for part in after]
    assert all(
        np.array_equal(x.reshape(BLOCKS, 4, -1)[15, 2:], y)
        for x, y in zip(before, tail, strict=True)
    )
    ends.close()


def test_nan_travels_exactly(ends: Ends) -> None:
    """Guards KV that a lossy codec cannot hold from failing a request that works without it."""
    ends.source.k(1)[2, 1, 0, 3] = float("nan")
    assert ends.open(ends.serve()).error is None
    assert isinstance(ends.fetch(tokens=TOKENS), Fetched)
    for theirs, ours in zip(ends.source.raw(1), ends.target.raw(1), strict=True):
        assert np.array_equal(theirs[2], ours[10])


@pytest.mark.parametrize(
    "kind", ["delay", "drop", "duplicate", "reorder", "corrupt", "truncate", "stall"]
)
def test_every_fault_at_every_encoded_chunk_is_mended(run_async: RunAsync, kind: str) -> None:
    """Guards wrong KV and hangs when encoded chunk i is harmed (24, 29, 32, 36, 41)."""
    context: Context = zmq.Context()
    for chunk in range(CHUNKS):
        ends = ends_for(context, "int8", MENDING)
        fault = ChunkFault(kind=kind, chunk=chunk, delay=Seconds(0.05))  # type: ignore[arg-type]
        assert ends.open(ends.serve("tcp://127.0.0.1:0", fault)).error is None
        outcome = ends.fetch(tokens=TOKENS)
        assert isinstance(outcome, Fetched), outcome
        assert error_of(ends) < 0.05, f"{kind} at chunk {chunk} brought wrong KV"
        assert (ends.reader.spoiled == 1) == (kind in ("corrupt", "truncate"))
        ends.close()
    context.term()


def another_checksum(frames: list[memoryview]) -> list[memoryview]:
    payload = bytearray(frames[1])
    payload[5] ^= 1
    return [frames[0], memoryview(payload)]


def another_codec(frames: list[memoryview]) -> list[memoryview]:
    encoded = EncodedBlocks.unpack(b"".join(frames))
    shape = encoded.header.shape
    k = torch.ones(shape.tokens, shape.heads, shape.k_dim, dtype=torch.bfloat16)
    other = make_codec("k4v4", LAYOUT).encode(k, k, shape.layer)
    return [memoryview(other.pack())]


def other_tokens(frames: list[memoryview]) -> list[memoryview]:
    shape = EncodedBlocks.unpack(b"".join(frames)).header.shape
    k = torch.ones(shape.tokens - 1, shape.heads, shape.k_dim, dtype=torch.bfloat16)
    return [memoryview(NoneCodec().encode(k, k, shape.layer).pack())]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda frames: [frames[1]], "bad magic"),
        (lambda frames: [frames[0], frames[1][:-3]], "payload bytes"),
        (lambda frames: [frames[0][:7]], "truncated"),
        (another_checksum, "damaged"),
        (another_codec, "expected 'int8'"),
        (other_tokens, "tokens is"),
        (lambda frames: [memoryview(bytes(10_000))], "encoded from"),
    ],
)
def test_a_payload_that_cannot_be_decoded_is_a_named_error(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, spoil: object, words: str
) -> None:
    """Guards the pool against a sender that vouches for nonsense (41, 67).

    Its checksum on the wire is right. The transfer fails by name after its attempts, nothing
    was written, and the next one works.
    """
    right = EncodedChunks.encode

    def wrong(
        self: EncodedChunks,
        codec: CodecName,
        chunk: PlannedChunk,
        blocks: Sequence[int],
        tokens: int,
    ) -> list[memoryview]:
        return spoil(right(self, codec, chunk, blocks, tokens))  # type: ignore[operator,no-any-return]

    before = [part.copy() for layer in range(3) for part in ends.target.raw(layer)]
    assert ends.open(ends.serve()).error is None
    monkeypatch.setattr(EncodedChunks, "encode", wrong)
    outcome = ends.fetch(tokens=TOKENS)
    assert isinstance(outcome, Failed)
    assert outcome.error.code == "transfer_failed" and outcome.error.retryable
    assert words in outcome.error.message
    after = [part for layer in range(3) for part in ends.target.raw(layer)]
    assert all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
    monkeypatch.undo()
    assert isinstance(ends.fetch(tokens=TOKENS), Fetched) and error_of(ends) < 0.05


def test_auto_sends_plain_where_the_link_is_faster_than_any_codec(context: Context) -> None:
    """Guards a loss on a link that needs none: in one machine nothing pays."""
    ends = ends_for(context, "none")
    ends.codec = "auto"
    assert ends.open(ends.serve()).error is None
    outcome = ends.fetch(tokens=TOKENS)
    assert isinstance(outcome, Fetched) and outcome.codec == "none"
    assert ends.equal()
    ends.close()


def test_auto_encodes_once_a_link_has_shown_that_it_is_slow(context: Context) -> None:
    """Guards a planner that never hears of the link's rate, or never gets to say so."""
    layout = KvLayout(dtype="bf16", block_size=16, layers=(LayerKv(8, 64, 64),) * 2)
    source, target = KvArena.create(layout, 32), KvArena.create(layout, 32)
    fill_normal(source, 1)
    slow = ChunkFault(kind="delay", probability=1.0, delay=0.05)
    server = HostServer(
        context,
        "tcp://127.0.0.1:0",
        source,
        worker="prefill-0",
        faults=FaultsSection(chunks=(slow,)),
    )
    outcomes: queue.SimpleQueue[Outcome[SourceKey]] = queue.SimpleQueue()
    limits = ReaderLimits(chunk_bytes=64 << 10, fetch=FetchLimits(slots=4, stall=5.0))
    reader: HostReader[SourceKey] = HostReader(context, target, limits, outcomes.put)
    arena = source.descriptor().arena_id
    reader.open(SOURCE, Peer(endpoint=server.endpoint, arena=arena, identity=b"d#1", codec="auto"))
    assert outcomes.get(timeout=DEADLINE) == Opened(SOURCE, None)
    codecs = []
    for number in range(2):
        blocks = tuple(range(32))
        reader.fetch(
            FetchJob(
                job=number,
                source=SOURCE,
                first_layer=0,
                end_layer=2,
                source_blocks=blocks,
                generations=(0,) * 32,
                target_blocks=blocks,
            )
        )
        fetched = outcomes.get(timeout=DEADLINE)
        assert isinstance(fetched, Fetched) and fetched.bytes == 32 * layout.block_bytes
        assert (fetched.wire < fetched.bytes) is (fetched.codec != "none")
        codecs.append(fetched.codec)
    assert codecs[0] == "none" != codecs[1]
    reader.close()
    server.close()
    source.close()
    target.close()
