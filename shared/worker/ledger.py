"""Gives the pool's blocks to sequences and takes them back."""

from collections.abc import Sequence as Items

from shared.ids import BlockHash, BlockId
from shared.kv.block_pool import BlockPool, OutOfBlocks
from shared.kv.hashing import HashChain
from shared.worker.live import usable_blocks
from shared.worker.sequence import Sequence


class Hold:
    """Target blocks of a pull, kept until no copy job can write to them any more."""

    __slots__ = ("blocks", "dropped", "jobs")

    def __init__(self) -> None:
        self.blocks: list[BlockId] = []
        self.jobs = 0
        self.dropped = False


class BlockLedger:
    """All dealings of sequences with the pool.

    ``window`` is the widest sliding window of the model: KV from elsewhere may lack what lies
    before it.
    """

    def __init__(self, pool: BlockPool, window: int | None = None) -> None:
        self.pool = pool
        self._window = window
        self.held: list[Hold] = []

    def needed(self, tokens: int) -> int:
        """Return the number of blocks that ``tokens`` tokens take."""
        return -(-tokens // self.pool.block_size)

    def place(self, sequence: Sequence, spare: int) -> bool:
        """Give a sequence the blocks of all its tokens, cached ones first.

        Leaves at least ``spare`` blocks available afterwards, or changes nothing and returns
        False. A sequence that computes here computes its last token at least.
        """
        matched = self._match(sequence)
        missing = self.needed(len(sequence.tokens)) - len(matched)
        self.pool.retain(matched)
        if self.pool.num_available < missing + spare:
            self.pool.release(matched)
            return False
        sequence.blocks = matched + self.pool.allocate(missing)
        sequence.sealed = len(matched)
        sequence.computed = len(matched) * self.pool.block_size
        if sequence.cached is None and sequence.kind != "expect":
            sequence.cached = sequence.computed
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Give it the block its next token needs, if it lacks one. False: none is available."""
        missing = self.needed(len(sequence.tokens)) - len(sequence.blocks)
        if missing <= 0:
            return True
        try:
            sequence.blocks += self.pool.allocate(missing)
        except OutOfBlocks:
            return False
        return True

    def seal(self, sequence: Sequence) -> None:
        """Make every block that is full and computed findable by its content."""
        full = sequence.computed // self.pool.block_size
        if full <= sequence.sealed:
            return
        hashes = self._hashes(sequence)
        for index in range(sequence.sealed, full):
            whole = index >= sequence.whole_from
            self.pool.seal(sequence.blocks[index], hashes[index], whole=whole)
        sequence.sealed = full

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back; its tokens must be computed again if it goes on."""
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.sealed = sequence.whole_from = 0

    def detach(self, sequence: Sequence, hold: Hold) -> None:
        """Take all blocks back, but not before the copy jobs into them are over."""
        hold.dropped = True
        if hold.jobs == 0:
            self.release(sequence)
            return
        hold.blocks, sequence.blocks = sequence.blocks, []
        sequence.computed = sequence.sealed = sequence.whole_from = 0
        self.held.append(hold)

    def job_over(self, hold: Hold) -> None:
        """Count a copy job of ``hold`` as over."""
        hold.jobs -= 1
        if hold.dropped and hold.jobs == 0:
            self.held.remove(hold)
            self.pool.release(hold.blocks)
            hold.blocks = []

    def _match(self, sequence: Sequence) -> list[BlockId]:
        """Find cached blocks; prompt log probabilities need every token computed."""
        if sequence.kind == "expect":
            usable = len(sequence.tokens)
        elif sequence.lacks_prompt_logprobs:
            usable = 0
        else:
            usable = len(sequence.tokens) - 1
        full = usable // self.pool.block_size
        found = self.pool.match(self._hashes(sequence)[:full]) if full else []
        if self._window is None:
            return found
        whole = [self.pool.is_whole(block) for block in found]
        return found[: usable_blocks(whole, self._window, self.pool.block_size)]

    def _hashes(self, sequence: Sequence) -> Items[BlockHash]:
        chain = sequence.hashes
        if chain is None:
            chain = HashChain(self.pool.block_size, sequence.request.tenant)
            sequence.hashes = chain
        chain.extend(sequence.tokens[chain.num_tokens :])
        return chain.hashes
