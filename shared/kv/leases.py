"""Leases: who outside this process may still read which blocks, and until when."""

from collections.abc import Sequence

from shared.ids import BlockId, TransferId


class LeaseTable:
    """Blocks held per transfer, each with a deadline. Pure: it is told the time.

    A block may be under several leases (shared prefixes) and is in each of them once.
    """

    def __init__(self, num_blocks: int) -> None:
        self._counts = [0] * num_blocks
        self._blocks: dict[TransferId, dict[BlockId, None]] = {}
        self._deadlines: dict[TransferId, float] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def count(self, block: BlockId) -> int:
        """Return the number of leases on ``block``."""
        return self._counts[block]

    def blocks(self, transfer: TransferId) -> list[BlockId]:
        """Return the blocks under ``transfer`` in the order they were added."""
        return list(self._blocks.get(transfer, ()))

    def transfers(self) -> list[TransferId]:
        """Return all open transfers, oldest first."""
        return list(self._blocks)

    def add(self, transfer: TransferId, blocks: Sequence[BlockId], deadline: float) -> None:
        """Open a lease, or add blocks to it; those it has already are not counted twice."""
        held = self._blocks.setdefault(transfer, {})
        for block in blocks:
            if block not in held:
                held[block] = None
                self._counts[block] += 1
        self._deadlines[transfer] = max(deadline, self._deadlines.get(transfer, deadline))

    def renew(self, transfer: TransferId, deadline: float) -> bool:
        """Move the deadline, never backwards. False: no such lease (any more)."""
        if transfer not in self._deadlines:
            return False
        self._deadlines[transfer] = max(deadline, self._deadlines[transfer])
        return True

    def remove(self, transfer: TransferId) -> list[BlockId] | None:
        """Close a lease and return its blocks; None: no such lease (any more)."""
        held = self._blocks.pop(transfer, None)
        if held is None:
            return None
        del self._deadlines[transfer]
        for block in held:
            self._counts[block] -= 1
        return list(held)

    def due(self, now: float) -> list[TransferId]:
        """Return the transfers whose deadline is ``now`` or earlier."""
        return [transfer for transfer, deadline in self._deadlines.items() if deadline <= now]

    def check(self) -> None:
        """Recount everything. Raises ``AssertionError``."""
        counts = [0] * len(self._counts)
        for held in self._blocks.values():
            for block in held:
                counts[block] += 1
        if counts != self._counts:
            raise AssertionError("lease counts differ from the blocks under lease")
        if set(self._blocks) != set(self._deadlines):
            raise AssertionError("a lease lacks its deadline or the reverse")
