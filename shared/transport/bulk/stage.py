"""What lies between a pool and the frames on the wire, for one thread.

A pool in the machine's memory needs nothing in between: ``ArenaStage``. For one in a GPU's memory
``shared.device.cuda_stage`` goes through pinned slabs.
"""

from collections.abc import Sequence
from typing import Protocol

from shared.device.device import SharedKv
from shared.kv.arena import KvArena
from shared.transport.bulk.payload import Pool, land, lift
from shared.transport.bulk.plan import PlannedChunk


class Lift(Protocol):
    """A chunk on its way out of a pool; either of the two ends it, and is called."""

    def frames(self) -> list[memoryview]:
        """Return its bytes once they are there; the checksum is taken of these very bytes."""
        ...

    def drop(self) -> None:
        """Return once nothing writes to its memory; nothing to do after ``frames``."""
        ...


class OutStage(Protocol):
    """Takes chunks out of a pool."""

    @property
    def room(self) -> bool:
        """Whether ``lift`` can be called; False while all slabs are on their way."""
        ...

    def lift(self, chunk: PlannedChunk, blocks: Sequence[int]) -> Lift:
        """Begin to take a chunk out; other chunks may be begun before its frames are asked for."""
        ...

    def close(self) -> None:
        """Give back what the stage holds, after its thread has ended."""
        ...


class InStage(Protocol):
    """Puts chunks into a pool."""

    def land(
        self, chunk: PlannedChunk, blocks: Sequence[int], frames: Sequence[memoryview]
    ) -> None:
        """Begin to put verified frames to their blocks; the frames may be reused on return."""
        ...

    def settle(self) -> None:
        """Return once everything that was begun is in its blocks, and nothing writes any more."""
        ...

    def close(self) -> None:
        """Give back what the stage holds, after its thread has ended."""
        ...


class _View:
    def __init__(self, pool: Pool, chunk: PlannedChunk, blocks: Sequence[int]) -> None:
        self._of = pool, chunk, blocks

    def frames(self) -> list[memoryview]:
        return lift(*self._of)

    def drop(self) -> None:
        return


class ArenaStage:
    """Frames are views of the pool, and bytes are in place when ``land`` returns."""

    room = True

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def lift(self, chunk: PlannedChunk, blocks: Sequence[int]) -> Lift:
        """See ``payload.lift``."""
        return _View(self._pool, chunk, blocks)

    def land(
        self, chunk: PlannedChunk, blocks: Sequence[int], frames: Sequence[memoryview]
    ) -> None:
        """See ``payload.land``."""
        land(self._pool, chunk, blocks, frames)

    def settle(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Hold nothing."""


def in_memory(pool: SharedKv) -> KvArena:
    """Return the pool if its bytes can be read in place; another needs a stage."""
    assert isinstance(pool, KvArena)
    return pool
