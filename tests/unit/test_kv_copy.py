"""Copies between arenas: bit-exact, and never trusted after a reuse."""

import random

import msgspec
import numpy as np
import pytest
import torch

from shared.errors import IncompatiblePeer, TransferFailed
from shared.kv.arena import KvArena
from shared.kv.block_pool import BlockPool
from shared.kv.copy import copy_blocks, verify_generations
from shared.kv.layout import KvDtype, KvLayout, LayerKv
from tests.unit.kv_owner import LAYOUT, NUM_BLOCKS, fill, open_of, owner_process, read_line

ALL = range(len(LAYOUT.layers))


def _uniform(arena: KvArena, block: int) -> float | None:
    """Return the canary that fills all of a block's K and (negated) V, or None if torn."""
    values = {float(x) for i in ALL for x in arena.k(i)[block].unique()}
    values |= {-float(x) for i in ALL for x in arena.v(i)[block].unique()}
    return values.pop() if len(values) == 1 else None


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dims", [(64, 64), (24, 16), (1, 3)])
def test_bit_exact_for_every_dtype_and_shape(dtype: KvDtype, dims: tuple[int, int]) -> None:
    """Guards scenario 35: any bit pattern (NaN payloads too) survives, other blocks stay."""
    layers = (LayerKv(3, *dims), LayerKv(3, *dims, shares=0), LayerKv(1, *dims, window=8))
    layout = KvLayout(dtype=dtype, block_size=5, layers=layers)
    source, target = KvArena.create(layout, 12), KvArena.create(layout, 9)
    rng = np.random.default_rng(1)
    for arena in (source, target):
        for layer in (0, 2):
            for part in arena.raw(layer):
                part[:] = rng.integers(0, 256, part.shape, dtype=np.uint8)
    before = [[p.copy() for p in target.raw(layer)] for layer in range(3)]
    theirs, ours = [4, 5, 6, 11, 10, 0, 1], [1, 2, 3, 4, 5, 8, 0]
    copied = copy_blocks(source, target, range(3), theirs, ours)
    assert copied == 7 * layout.block_bytes
    for layer in range(3):
        for theirs_raw, ours_raw, old in zip(
            source.raw(layer), target.raw(layer), before[layer], strict=True
        ):
            assert np.array_equal(ours_raw[ours], theirs_raw[theirs])
            rest = [b for b in range(9) if b not in ours]
            assert np.array_equal(ours_raw[rest], old[rest])
        bits = torch.int32 if dtype == "fp32" else torch.int16
        assert torch.equal(target.k(layer)[ours].view(bits), source.k(layer)[theirs].view(bits))
    source.close()
    target.close()


def test_layer_ranges_copy_their_layers_only() -> None:
    """Guards pipelining: announced layers are copied, those still being computed are not."""
    source, target = KvArena.create(LAYOUT, 4), KvArena.create(LAYOUT, 4)
    fill(source, 1, 3.0)
    assert copy_blocks(source, target, range(1, 1), [1], [2]) == 0
    assert copy_blocks(source, target, range(1, 2), [1], [2]) == 0, "an alias has no bytes"
    assert copy_blocks(source, target, range(2, 3), [1], [2]) == LAYOUT.layer_block_bytes(2)
    assert not target.k(0).any()
    assert torch.all(target.k(2)[2] == 3.0)
    assert copy_blocks(source, target, range(0, 2), [1], [2]) == LAYOUT.layer_block_bytes(0)
    assert _uniform(target, 2) == 3.0
    source.close()
    target.close()


def test_nonsense_from_the_wire_fails_the_transfer_only() -> None:
    """Guards against block ids and layers that would reach outside or wrap around."""
    source, target = KvArena.create(LAYOUT, 4), KvArena.create(LAYOUT, 4)
    bad = [
        (range(0, 4), [0], [0]),
        (range(-1, 2), [0], [0]),
        (range(2, 1), [0], [0]),
        (range(0, 3, 2), [0], [0]),
        (ALL, [4], [0]),
        (ALL, [-1], [0]),
        (ALL, [0], [4]),
        (ALL, [0, 1], [0]),
    ]
    for layers, theirs, ours in bad:
        with pytest.raises(TransferFailed):
            copy_blocks(source, target, layers, theirs, ours)
    for blocks, generations in (([4], [0]), ([-1], [0]), ([0, 1], [0])):
        with pytest.raises(TransferFailed):
            verify_generations(source, blocks, generations)
    assert verify_generations(source, [], []) == []
    assert verify_generations(source, [0, 1, 2], [0, 2**64 + 5, -1]) == [1, 2]
    other = KvArena.create(msgspec.structs.replace(LAYOUT, block_size=LAYOUT.block_size + 1), 4)
    with pytest.raises(IncompatiblePeer):
        copy_blocks(source, other, ALL, [0], [0])
    for arena in (source, target, other):
        arena.close()


@pytest.mark.parametrize("seed", range(30))
def test_delayed_writer_during_the_copy_is_detected(seed: int) -> None:
    """Guards scenario 32: blocks reused while a copy runs must never pass verification.

    Between the layers of a copy the owner takes blocks back (as after an expired lease)
    and overwrites any number of their layers; every block carries its own canary.
    """
    rng = random.Random(seed)
    owner, target = KvArena.create(LAYOUT, NUM_BLOCKS), KvArena.create(LAYOUT, NUM_BLOCKS)
    source = KvArena.open(owner.descriptor(), LAYOUT)
    pool = BlockPool(NUM_BLOCKS, LAYOUT.block_size, generations=owner.generations)
    blocks = pool.allocate(NUM_BLOCKS)
    for block in blocks:
        fill(owner, block, block + 1)
    announced = [pool.generation(b) for b in blocks]
    reused: set[int] = set()
    for layer in ALL:
        if rng.random() < 0.5:
            pool.release([rng.choice([b for b in blocks if b not in reused])])
            victim = pool.allocate(1)[0]
            reused.add(victim)
            for late in (i for i in ALL if rng.random() < 0.5):
                owner.k(late)[victim] = 1000.0
        copy_blocks(source, target, range(layer, layer + 1), blocks, blocks)
    stale = set(verify_generations(source, blocks, announced))
    assert stale == reused
    for block in blocks:
        assert block in stale or _uniform(target, block) == block + 1
    for arena in (source, target, owner):
        arena.close()


def test_concurrent_writer_in_another_process_is_detected() -> None:
    """Guards the order of generation and bytes across processes: verified means intact."""
    rounds = 200
    target = KvArena.create(LAYOUT, NUM_BLOCKS)
    verified = 0
    with owner_process("churn", rounds) as owner:
        source = open_of(owner)
        while (line := read_line(owner)) != b'"end"\n':
            announced = msgspec.json.decode(line, type=list[tuple[int, int]])
            blocks = [b for b, _ in announced]
            copy_blocks(source, target, ALL, blocks, blocks)
            stale = verify_generations(source, blocks, [g for _, g in announced])
            for block, generation in announced:
                if block not in stale:
                    verified += 1
                    assert _uniform(target, block) == generation
        source.close()
    assert verified >= NUM_BLOCKS, "the last round is not overwritten any more"
    target.close()
