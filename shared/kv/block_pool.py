"""Who holds which KV block: reference counts, prefix cache, leases, generations. Pure."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol, SupportsInt

from msgspec import Struct

from shared.ids import BlockHash, BlockId, TransferId
from shared.kv.leases import LeaseTable


class OutOfBlocks(Exception):
    """Fewer blocks are free or evictable than were asked for."""


class GenerationTable(Protocol):
    """One unsigned counter per block: a list, or the array in the arena's header."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> SupportsInt: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


class PoolStats(Struct, frozen=True, kw_only=True):
    """Blocks by state; free + cached + leased + active = total.

    ``active``: a sequence of this worker refers to it (leased or not). ``leased``: no
    sequence does, but a peer may still read it. ``cached``: neither, but a prompt prefix
    can find it; evictable. ``free``: holds nothing.
    """

    total: int
    free: int
    cached: int
    leased: int
    active: int


class BlockPool:
    """The blocks ``0 .. num_blocks - 1`` of one arena.

    Every method either does all it was asked or raises and changes nothing. ``ValueError``
    means that the caller lost track of its blocks (unknown id, release without a
    reference, use of a free block).

    ``generations`` counts the allocations of each block and is where peers look after a
    copy; ``prefix_cache=False`` finds nothing and keeps nothing.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        generations: GenerationTable | None = None,
        prefix_cache: bool = True,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("a block pool needs at least one block of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._generations = [0] * num_blocks if generations is None else generations
        if len(self._generations) != num_blocks:
            raise ValueError(f"{len(self._generations)} generations for {num_blocks} blocks")
        self._prefix_cache = prefix_cache
        self._refs = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._partial: set[BlockId] = set()
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]
        self._lru: dict[BlockId, None] = {}
        self._active = 0
        self._leases = LeaseTable(num_blocks)

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can hand out: free + cached."""
        return len(self._free) + len(self._lru)

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Return the blocks of the longest findable prefix of ``hashes``.

        Nothing is changed: ``retain`` them before the next ``allocate``, which might evict
        them. Equality of the 16-byte hash stands for equality of tokens, position and
        tenant (``shared.kv.hashing``).
        """
        found: list[BlockId] = []
        for value in hashes:
            block = self._by_hash.get(value)
            if block is None:
                break
            found.append(block)
        return found

    def allocate(self, n: int) -> list[BlockId]:
        """Take ``n`` blocks with one reference each, in ascending order.

        Free ones first, then the least recently released cached ones. Their generation
        moves on before they are returned, thus before anything is written to them.

        Raises:
            OutOfBlocks: fewer than ``n`` are available.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self.num_available:
            raise OutOfBlocks(f"{n} blocks needed, {self.num_available} available")
        taken = sorted(self._free.pop() if self._free else self._evict() for _ in range(n))
        for block in taken:
            self._generations[block] = int(self._generations[block]) + 1
            self._refs[block] = 1
        self._active += n
        return taken

    def retain(self, blocks: Sequence[BlockId]) -> None:
        """Add a reference to each; they may be active, leased or cached, but not free."""
        self._require_used(blocks)
        for block in blocks:
            if self._refs[block] == 0:
                self._lru.pop(block, None)
                self._active += 1
            self._refs[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop a reference to each block of a sequence, given head first.

        The tail is let go first, so that it is evicted before the head it depends on.
        """
        for block, times in Counter(blocks).items():
            if not 0 <= block < self.num_blocks or self._refs[block] < times:
                raise ValueError(f"block {block} is released more often than it is referenced")
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._active -= 1
                self._settle(block)

    def seal(self, block: BlockId, hash: BlockHash, *, whole: bool = True) -> None:
        """Declare ``block`` full and written: prompts can find it under ``hash`` from now on.

        A block that is not ``whole`` lacks the KV of some layers. When another block has this
        hash already, that one stays the entry and ``block`` becomes free once it is let go;
        but a whole one takes the place of one that is not.
        """
        self._require_used([block])
        if self._hashes[block] not in (None, hash):
            raise ValueError(f"block {block} is sealed under another hash")
        if not self._prefix_cache:
            return
        former = self._by_hash.get(hash)
        if former is not None:
            if not whole or former not in self._partial or former == block:
                return
            self._forget(former)
        self._hashes[block] = hash
        self._by_hash[hash] = block
        if not whole:
            self._partial.add(block)

    def is_whole(self, block: BlockId) -> bool:
        """Return whether no layer's KV is missing in a block that ``match`` found."""
        return block not in self._partial

    def generation(self, block: BlockId) -> int:
        """Return how often ``block`` was allocated so far."""
        return int(self._generations[block])

    def lease(self, transfer: TransferId, blocks: Sequence[BlockId], deadline: float) -> None:
        """Keep ``blocks`` for a reader until acknowledged or ``deadline`` (same clock as expire).

        The lease holds blocks of its own: the sequence may release them. Called again for
        the same transfer it adds those not yet in it (chunked prefill) and renews.
        """
        if not blocks:
            raise ValueError(f"lease of transfer {transfer} without blocks")
        self._require_used(blocks)
        self._leases.add(transfer, blocks, deadline)
        for block in blocks:
            self._lru.pop(block, None)

    def leased(self, transfer: TransferId) -> list[BlockId]:
        """Return the blocks under ``transfer`` in the order they were added; [] if none."""
        return self._leases.blocks(transfer)

    def renew(self, transfer: TransferId, deadline: float) -> bool:
        """Extend a lease, never shorten it. False: it ended or never was."""
        return self._leases.renew(transfer, deadline)

    def end_lease(self, transfer: TransferId) -> bool:
        """Let the blocks of a lease go. False: it ended before or never was."""
        blocks = self._leases.remove(transfer)
        for block in reversed(blocks or ()):
            if self._refs[block] == 0 and self._leases.count(block) == 0:
                self._settle(block)
        return blocks is not None

    def expire(self, now: float) -> list[TransferId]:
        """End every lease whose deadline is ``now`` or earlier and return their transfers."""
        due = self._leases.due(now)
        for transfer in due:
            self.end_lease(transfer)
        return due

    def stats(self) -> PoolStats:
        """Return the number of blocks in each state."""
        free, cached = len(self._free), len(self._lru)
        return PoolStats(
            total=self.num_blocks,
            free=free,
            cached=cached,
            leased=self.num_blocks - free - cached - self._active,
            active=self._active,
        )

    def check(self) -> None:
        """Recompute every count and index from the references. Raises ``AssertionError``."""
        self._leases.check()
        states: dict[str, set[int]] = {"free": set(), "cached": set(), "leased": set()}
        active = 0
        for block in map(BlockId, range(self.num_blocks)):
            if self._refs[block]:
                active += 1
            else:
                states[self._idle_state(block)].add(block)
        _expect(self._active == active, f"{self._active} active counted, {active} found")
        for name, kept in (("free", self._free), ("cached", list(self._lru))):
            _expect(len(kept) == len(set(kept)), f"a block is twice among the {name} ones")
            _expect(set(kept) == states[name], f"{name} blocks {kept} are not {states[name]}")
        _expect(min(self._refs) >= 0, "a reference count is negative")
        _expect(self.stats().leased == len(states["leased"]), "leased blocks do not add up")
        index = {h: BlockId(b) for b, h in enumerate(self._hashes) if h is not None}
        _expect(index == self._by_hash, "the hash index differs from the blocks' hashes")
        _expect(self._partial <= set(index.values()), "a partial block is not in the cache")

    def _idle_state(self, block: BlockId) -> str:
        if self._leases.count(block):
            return "leased"
        return "free" if self._hashes[block] is None else "cached"

    def _settle(self, block: BlockId) -> None:
        """Put a block without references where its leases and its hash say."""
        state = self._idle_state(block)
        if state == "cached":
            self._lru[block] = None
        elif state == "free":
            self._free.append(block)

    def _evict(self) -> BlockId:
        block = next(iter(self._lru))
        del self._lru[block]
        self._unseal(block)
        return block

    def _forget(self, block: BlockId) -> None:
        """Take a block out of the prefix cache; one that nobody holds becomes free."""
        self._unseal(block)
        if block in self._lru:
            del self._lru[block]
            self._free.append(block)

    def _unseal(self, block: BlockId) -> None:
        value = self._hashes[block]
        if value is not None:
            del self._by_hash[value]
        self._hashes[block] = None
        self._partial.discard(block)

    def _require_used(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block} is not in a pool of {self.num_blocks}")
            if self._refs[block] == 0 and self._idle_state(block) == "free":
                raise ValueError(f"block {block} is free and cannot be held")


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
