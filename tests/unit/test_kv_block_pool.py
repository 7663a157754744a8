"""BlockPool against an independent model, and the promises others build on."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.ids import BlockHash, BlockId, TransferId
from shared.kv.block_pool import BlockPool, OutOfBlocks

NUM_BLOCKS = 7


def _hash(i: int) -> BlockHash:
    return BlockHash(i.to_bytes(16, "big"))


def _ids(*blocks: int) -> list[BlockId]:
    return [BlockId(b) for b in blocks]


class Model:
    """What the pool must do, written the slow way: sets, lists and no counters."""

    def __init__(self) -> None:
        self.holders: dict[int, list[str]] = {b: [] for b in range(NUM_BLOCKS)}
        self.hashes: dict[int, BlockHash] = {}
        self.idle_order: list[int] = []
        self.leases: dict[int, tuple[list[int], float]] = {}
        self.allocations = [0] * NUM_BLOCKS

    def state(self, block: int) -> str:
        if "seq" in self.holders[block]:
            return "active"
        if self.holders[block]:
            return "leased"
        return "cached" if block in self.hashes else "free"

    def in_state(self, name: str) -> list[int]:
        return [b for b in range(NUM_BLOCKS) if self.state(b) == name]

    def allocated(self, n: int, blocks: list[int]) -> None:
        assert len(set(blocks)) == n and blocks == sorted(blocks)
        free = self.in_state("free")
        evictions = max(0, n - len(free))
        oldest = [b for b in self.idle_order if self.state(b) == "cached"][:evictions]
        if evictions:
            assert set(blocks) == {*free, *oldest}, "not the least recently used were evicted"
        else:
            assert set(blocks) <= set(free), "a cached block was evicted before a free one"
        for block in blocks:
            self.hashes.pop(block, None)
            self.take(block, "seq")
            self.allocations[block] += 1

    def take(self, block: int, holder: str) -> None:
        if block in self.idle_order:
            self.idle_order.remove(block)
        self.holders[block].append(holder)

    def drop(self, blocks: list[int], holder: str) -> None:
        for block in reversed(blocks):
            self.holders[block].remove(holder)
            if not self.holders[block]:
                self.idle_order.append(block)

    def end_lease(self, transfer: int) -> bool:
        if transfer not in self.leases:
            return False
        blocks, _ = self.leases.pop(transfer)
        self.drop(blocks, f"lease {transfer}")
        return True


class Pair:
    """Applies one event to the pool and to the model and compares."""

    def __init__(self) -> None:
        self.generations = np.zeros(NUM_BLOCKS, dtype="<u8")
        self.pool = BlockPool(NUM_BLOCKS, 4, generations=self.generations)
        self.model = Model()
        self.partial: set[int] = set()
        self.now = 0.0

    def apply(self, kind: int, a: int, b: int) -> None:
        events = (
            self.allocate,
            self.retain,
            self.release,
            self.release_sequence,
            self.seal,
            self.match_and_retain,
            self.lease,
            self.renew,
            self.end_lease,
            self.expire,
        )
        events[kind % len(events)](a, b)
        self.compare()

    def allocate(self, a: int, b: int) -> None:
        n = a % 4
        room = len(self.model.in_state("free")) + len(self.model.in_state("cached"))
        if n > room:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(n)
            return
        self.model.allocated(n, list(map(int, self.pool.allocate(n))))

    def retain(self, a: int, b: int) -> None:
        block = BlockId(a % NUM_BLOCKS)
        if self.model.state(block) == "free":
            with pytest.raises(ValueError, match="free"):
                self.pool.retain([block])
            return
        self.pool.retain([block])
        self.model.take(block, "seq")

    def release(self, a: int, b: int) -> None:
        block = BlockId(a % NUM_BLOCKS)
        if self.model.state(block) != "active":
            with pytest.raises(ValueError, match="released more often"):
                self.pool.release([block])
            return
        self.pool.release([block])
        self.model.drop([block], "seq")

    def release_sequence(self, a: int, b: int) -> None:
        blocks = self.model.in_state("active")
        random.Random(a).shuffle(blocks)
        blocks = blocks[: b % (NUM_BLOCKS + 1)]
        self.pool.release(_ids(*blocks))
        self.model.drop(blocks, "seq")

    def seal(self, a: int, b: int) -> None:
        block, value = BlockId(a % NUM_BLOCKS), _hash(b % 5)
        known = self.model.hashes.get(block)
        if self.model.state(block) == "free" or known not in (None, value):
            with pytest.raises(ValueError):
                self.pool.seal(block, value)
            return
        whole = a // NUM_BLOCKS % 2 == 0
        self.pool.seal(block, value, whole=whole)
        (former,) = [k for k, v in self.model.hashes.items() if v == value] or (None,)
        if former is not None and former != block and whole and former in self.partial:
            del self.model.hashes[former]
            former = None
        if former is None:
            self.model.hashes[block] = value
            self.partial -= {block}
            self.partial |= set() if whole else {int(block)}

    def match_and_retain(self, a: int, b: int) -> None:
        wanted = [_hash((a + i) % 5) for i in range(b % 4)]
        found = self.pool.match(wanted)
        expected = []
        for value in wanted:
            holder = [k for k, v in self.model.hashes.items() if v == value]
            if not holder:
                break
            expected += holder
        assert found == expected
        for block in found:
            assert self.pool.is_whole(block) is (block not in self.partial)
        self.pool.retain(found)
        for block in found:
            self.model.take(block, "seq")

    def lease(self, a: int, b: int) -> None:
        transfer, deadline = a % 3, self.now + b % 5
        blocks = [x for x in range(NUM_BLOCKS) if self.model.state(x) != "free"][: 1 + b % 4]
        if not blocks:
            with pytest.raises(ValueError):
                self.pool.lease(TransferId(transfer), _ids(a % NUM_BLOCKS), deadline)
            return
        self.pool.lease(TransferId(transfer), _ids(*blocks), deadline)
        held, old = self.model.leases.get(transfer, ([], deadline))
        for block in blocks:
            if block not in held:
                held.append(block)
                self.model.take(block, f"lease {transfer}")
        self.model.leases[transfer] = (held, max(old, deadline))

    def renew(self, a: int, b: int) -> None:
        transfer, deadline = a % 3, self.now + b % 5
        known = transfer in self.model.leases
        assert self.pool.renew(TransferId(transfer), deadline) is known
        if known:
            blocks, old = self.model.leases[transfer]
            self.model.leases[transfer] = (blocks, max(old, deadline))

    def end_lease(self, a: int, b: int) -> None:
        assert self.pool.end_lease(TransferId(a % 3)) is self.model.end_lease(a % 3)

    def expire(self, a: int, b: int) -> None:
        self.now += b % 3
        due = [t for t, (_, deadline) in self.model.leases.items() if deadline <= self.now]
        assert self.pool.expire(self.now) == due
        for transfer in due:
            self.model.end_lease(transfer)

    def compare(self) -> None:
        self.pool.check()
        stats = self.pool.stats()
        for name in ("free", "cached", "leased", "active"):
            assert getattr(stats, name) == len(self.model.in_state(name)), name
        assert stats.free + stats.cached + stats.leased + stats.active == stats.total == NUM_BLOCKS
        assert self.pool.num_available == stats.free + stats.cached
        assert self.generations.tolist() == self.model.allocations
        for block, value in self.model.hashes.items():
            assert self.pool.match([value]) == [block]


def _play(events: Iterator[tuple[int, int, int]] | list[tuple[int, int, int]]) -> None:
    pair = Pair()
    for event in events:
        pair.apply(*event)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20), st.integers(0, 20)), max_size=60))
def test_pool_equals_model_shrinkable(events: list[tuple[int, int, int]]) -> None:
    """Guards conservation: a leak, double free or eviction of held KV under any order."""
    _play(events)


@pytest.mark.parametrize("part", range(8))
def test_pool_equals_model_in_thousands_of_sequences(part: int) -> None:
    """Guards the same with breadth: 8 x 400 seeded sequences of 50 events."""
    for seed in range(400):
        rng = random.Random(part * 1000 + seed)
        _play((rng.randrange(10), rng.randrange(21), rng.randrange(21)) for _ in range(50))


def test_allocation_fails_without_change() -> None:
    """Guards against a half-done allocation that leaks what it took first."""
    pool = BlockPool(3, 4)
    pool.allocate(2)
    before = pool.stats()
    with pytest.raises(OutOfBlocks, match="2 blocks needed, 1 available"):
        pool.allocate(2)
    assert pool.stats() == before
    pool.check()


def test_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    """Guards prefix hits: evicting the head first would make the whole rest unfindable."""
    pool = BlockPool(4, 4)
    blocks = pool.allocate(4)
    for i, block in enumerate(blocks):
        pool.seal(block, _hash(i))
    pool.release(blocks)
    pool.allocate(1)
    assert pool.match([_hash(i) for i in range(4)]) == blocks[:3]
    pool.allocate(2)
    assert pool.match([_hash(i) for i in range(4)]) == blocks[:1]


def test_tail_goes_first_after_a_lease_too() -> None:
    """Guards the same where the reader's lease, not the sequence, lets go last."""
    pool = BlockPool(3, 4)
    blocks = pool.allocate(3)
    for i, block in enumerate(blocks):
        pool.seal(block, _hash(i))
    pool.lease(TransferId(1), blocks, 1.0)
    pool.release(blocks)
    pool.end_lease(TransferId(1))
    pool.allocate(1)
    assert pool.match([_hash(i) for i in range(3)]) == blocks[:2]


def test_leased_blocks_survive_release_and_pressure() -> None:
    """Guards scenario 12: KV of a hand-over evicted before the reader had it."""
    pool = BlockPool(3, 4)
    held = pool.allocate(2)
    pool.seal(held[0], _hash(0))
    pool.lease(TransferId(1), held, deadline=10.0)
    pool.release(held)
    assert pool.num_available == 1
    generations = [pool.generation(b) for b in held]
    assert not set(pool.allocate(1)) & set(held)
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    assert [pool.generation(b) for b in held] == generations
    assert pool.expire(9.999) == []
    assert pool.expire(10.0) == [TransferId(1)]
    stats = pool.stats()
    assert (stats.free, stats.cached, stats.leased) == (1, 1, 0)


def test_shared_prefix_under_two_leases_ends_with_the_last() -> None:
    """Guards against one reader's acknowledge freeing what another one still reads."""
    pool = BlockPool(2, 4)
    blocks = pool.allocate(2)
    pool.lease(TransferId(1), blocks[:1], 5.0)
    pool.lease(TransferId(2), blocks, 5.0)
    pool.release(blocks)
    assert pool.end_lease(TransferId(2))
    assert pool.stats().leased == 1
    assert pool.end_lease(TransferId(1))
    assert not pool.end_lease(TransferId(1)), "a late second acknowledge is a no-op"
    assert pool.stats().free == 2
    pool.check()


def test_late_renewal_neither_revives_nor_shortens() -> None:
    """Guards scenario 29: late or reordered renewals must not change the outcome."""
    pool = BlockPool(1, 4)
    pool.lease(TransferId(1), pool.allocate(1), 10.0)
    assert pool.renew(TransferId(1), 20.0)
    assert pool.renew(TransferId(1), 15.0)
    assert pool.expire(19.0) == []
    assert pool.expire(20.0) == [TransferId(1)]
    assert not pool.renew(TransferId(1), 99.0)


def test_duplicate_content_keeps_the_first_entry() -> None:
    """Guards the index: two sequences that compute the same prefix at the same time."""
    pool = BlockPool(2, 4)
    first, second = pool.allocate(2)
    pool.seal(first, _hash(1))
    pool.seal(second, _hash(1))
    pool.seal(first, _hash(1))
    assert pool.match([_hash(1)]) == [first]
    pool.release([first, second])
    assert (pool.stats().cached, pool.stats().free) == (1, 1)
    assert pool.match([_hash(1)]) == [first]


def test_prefix_cache_off_finds_and_keeps_nothing() -> None:
    """Guards ``kv_reuse.prefix: false``."""
    pool = BlockPool(1, 4, prefix_cache=False)
    blocks = pool.allocate(1)
    pool.seal(blocks[0], _hash(1))
    assert pool.match([_hash(1)]) == []
    pool.release(blocks)
    assert pool.stats().free == 1


@pytest.mark.parametrize("bad", [-1, 2])
def test_unknown_blocks_are_refused(bad: int) -> None:
    """Guards against python's negative indices reaching another sequence's block."""
    pool = BlockPool(2, 4)
    pool.allocate(2)
    block = BlockId(bad)
    for act in (
        lambda: pool.retain([block]),
        lambda: pool.release([block]),
        lambda: pool.seal(block, _hash(0)),
        lambda: pool.lease(TransferId(1), [block], 1.0),
    ):
        with pytest.raises(ValueError):
            act()
    pool.check()


def test_release_is_all_or_nothing() -> None:
    """Guards against half a release before the error is found."""
    pool = BlockPool(2, 4)
    a, b = pool.allocate(2)
    with pytest.raises(ValueError):
        pool.release([a, b, b])
    assert pool.stats().active == 2
    pool.check()


def test_refused_sizes() -> None:
    """Guards pool construction against sizes that no arena has."""
    for blocks, size in ((0, 4), (4, 0)):
        with pytest.raises(ValueError):
            BlockPool(blocks, size)
    with pytest.raises(ValueError, match="3 generations for 4 blocks"):
        BlockPool(4, 4, generations=[0, 0, 0])
    with pytest.raises(ValueError, match="without blocks"):
        BlockPool(4, 4).lease(TransferId(1), [], 1.0)
    with pytest.raises(ValueError):
        BlockPool(4, 4).allocate(-1)


def test_check_sees_corruption() -> None:
    """Guards the guard: ``check`` must fail when the books are cooked."""
    pool = BlockPool(2, 4)
    block = pool.allocate(1)[0]
    pool._free.append(block)
    with pytest.raises(AssertionError):
        pool.check()
