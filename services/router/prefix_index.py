"""What the router believes one worker has in its prefix cache."""

from collections import OrderedDict
from collections.abc import Sequence

from shared.ids import BlockHash


class PrefixIndex:
    """The block hashes this router sent to one worker, least recently sent forgotten first.

    Approximate on purpose: a wrong guess costs a recomputed block, never a wrong token.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks are believed to be cached."""
        blocks = self._blocks
        for count, block in enumerate(hashes):
            if block not in blocks:
                return count
        return len(hashes)

    def add(self, hashes: Sequence[BlockHash]) -> None:
        """Note that these blocks are, or will soon be, on the worker.

        The tail is touched first, so that a prefix outlives what hangs on it.
        """
        blocks = self._blocks
        for block in reversed(hashes[: self.capacity]):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)
