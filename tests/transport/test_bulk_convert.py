"""KV of another dtype on real sockets: verified like all KV, converted as it lands."""

from collections.abc import Iterator
from typing import get_args

import numpy as np
import pytest
import torch
import zmq

from shared.fault_rules import ChunkFault
from shared.kernels.kv_rows import from_rows, to_rows
from shared.kv.codecs.frame import CodecName
from shared.kv.layout import KvDtype
from shared.messages.hello import CONVERTIBLE
from shared.transport.bulk.fetches import Failed, FetchLimits
from shared.transport.bulk.reader import Fetched
from shared.units import Seconds
from tests.transport.harness import Context
from tests.transport.test_bulk_codecs import TOKENS
from tests.transport.test_bulk_link import BLOCKS, CALM, CHUNKS, FAST, LAYOUT, MENDING, Ends

DTYPES = tuple(dtype for dtype in get_args(KvDtype) if dtype in CONVERTIBLE)
STEP = 0.04  # of int8, of numbers up to 5: a fused product rounds ties otherwise


def ends_of(context: Context, source: KvDtype, target: KvDtype, limits: FetchLimits = FAST) -> Ends:
    ends = Ends(context, limits, (source, target))
    torch.manual_seed(1)
    for arena in (ends.source, ends.target):
        for layer in range(3):
            for pool in (arena.k(layer), arena.v(layer)):
                pool.copy_(to_rows(torch.randn(BLOCKS, 4, 2, 8), pool.dtype))
    return ends


@pytest.fixture
def ends(context: Context) -> Iterator[Ends]:
    pair = ends_of(context, "bf16", "int8")
    yield pair
    pair.close()


def error_of(ends: Ends, tokens: int = 32) -> float:
    """Return the largest difference to what converting in one process makes of the source."""
    worst = 0.0
    for layer in range(3):
        for name in ("k", "v"):
            theirs = getattr(ends.source, name)(layer)[:8].flatten(0, 1)[:tokens]
            ours = getattr(ends.target, name)(layer)[8:16].flatten(0, 1)[:tokens]
            same = theirs.dtype == ours.dtype
            expected = theirs if same else to_rows(from_rows(theirs), ours.dtype)
            apart = (from_rows(ours).float() - from_rows(expected).float()).abs()
            worst = max(worst, float(apart.max()))
    return worst


def parts(ends: Ends) -> list[np.ndarray]:
    return [part.copy() for layer in range(3) for part in ends.target.raw(layer)]


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_every_pair_of_dtypes_arrives_and_nothing_else_is_touched(
    context: Context, source: KvDtype, target: KvDtype
) -> None:
    """Guards chunks planned by the wrong side's sizes, and bytes taken for another dtype."""
    ends = ends_of(context, source, target, CALM)
    before = parts(ends)
    assert ends.open(ends.serve()).error is None
    outcome = ends.fetch()
    assert isinstance(outcome, Fetched) and outcome.again == 0
    assert outcome.bytes == outcome.wire == 8 * ends.source.layout.block_bytes
    assert error_of(ends) <= (STEP if target == "int8" else 0.0)
    rest = [b for b in range(BLOCKS) if not 8 <= b < 16]
    assert all(np.array_equal(x[rest], y[rest]) for x, y in zip(before, parts(ends), strict=True))
    ends.close()


@pytest.mark.parametrize("kind", ["drop", "duplicate", "reorder", "corrupt", "truncate"])
def test_every_fault_at_every_chunk_is_mended(kind: str) -> None:
    """Guards a harmed chunk that is converted before it is verified (24, 29, 32, 36, 41)."""
    context: Context = zmq.Context()
    for chunk in range(CHUNKS):
        ends = ends_of(context, "bf16", "int8", MENDING)
        fault = ChunkFault(kind=kind, chunk=chunk, delay=Seconds(0.05))  # type: ignore[arg-type]
        assert ends.open(ends.serve("tcp://127.0.0.1:0", fault)).error is None
        assert isinstance(ends.fetch(), Fetched)
        assert error_of(ends) < STEP, f"{kind} at chunk {chunk} brought wrong KV"
        assert (ends.reader.spoiled == 1) == (kind in ("corrupt", "truncate"))
        ends.close()
    context.term()


def test_a_chunk_that_never_verifies_leaves_the_pool_as_it_was(ends: Ends) -> None:
    """Guards the pool against KV that was converted although its checksum is wrong (41)."""
    before = parts(ends)
    fault = ChunkFault(kind="corrupt", probability=1.0)
    assert ends.open(ends.serve("tcp://127.0.0.1:0", fault)).error is None
    outcome = ends.fetch()
    assert isinstance(outcome, Failed) and "wrong checksum" in outcome.error.message
    assert all(np.array_equal(x, y) for x, y in zip(before, parts(ends), strict=True))


def test_blocks_that_were_used_anew_are_refused(ends: Ends) -> None:
    """Guards KV of another request under the old block number (32)."""
    assert ends.open(ends.serve()).error is None
    outcome = ends.fetch_used_anew()
    assert isinstance(outcome, Failed) and outcome.reused == 1


@pytest.mark.parametrize("codec", ["int8", "k8v4", "cachegen"])
@pytest.mark.parametrize(
    ("source", "target"), [("bf16", "int8"), ("int8", "bf16"), ("int8", "int8")]
)
def test_codecs_bring_kv_from_and_into_int8(
    context: Context, codec: CodecName, source: KvDtype, target: KvDtype
) -> None:
    """Guards a codec that reads scales as elements, and tokens of others in the last block."""
    ends = ends_of(context, source, target, CALM)
    ends.codec = codec
    before = parts(ends)
    assert ends.open(ends.serve()).error is None
    outcome = ends.fetch(tokens=TOKENS)
    assert isinstance(outcome, Fetched) and outcome.codec == codec and outcome.again == 0
    assert outcome.bytes == 8 * LAYOUT.with_dtype(source).block_bytes
    assert error_of(ends, TOKENS) < 0.5  # of 4 bits, and then of int8
    tails = [part.reshape(BLOCKS, 4, -1)[15, 2:] for part in parts(ends)]
    assert all(
        np.array_equal(x.reshape(BLOCKS, 4, -1)[15, 2:], y)
        for x, y in zip(before, tails, strict=True)
    )
    ends.close()


def test_nan_stays_in_its_token_and_head(ends: Ends) -> None:
    """Guards KV that no codec can hold: it travels exactly, and one row of int8 is NaN."""
    ends.codec = "k8v4"
    ends.source.k(1)[2, 1, 0, 3] = float("nan")
    assert ends.open(ends.serve()).error is None
    assert isinstance(ends.fetch(tokens=TOKENS), Fetched)
    lost = from_rows(ends.target.k(1)[8:16]).isnan()
    assert bool(lost[2, 1, 0].all()) and int(lost.sum()) == 8
