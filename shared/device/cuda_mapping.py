"""A peer's pool in GPU memory, mapped into this process, and pulling blocks out of it."""

from collections.abc import Sequence
from typing import Final

from shared.device.cuda_layout import PAGE, canary, cuda_arena_size, regions, stacks
from shared.device.cuda_pool import BOOK_LAYOUT, CudaPool
from shared.device.cuda_stream import SideStream
from shared.device.owner import Owner
from shared.device.pinned import Bytes, address_of
from shared.errors import IncompatiblePeer, TransferFailed
from shared.kv.arena import KvArena
from shared.kv.copy import merge_runs, require_places, verify_generations
from shared.messages.prefill_decode import ArenaDescriptor

PROBE_SLABS: Final = 2


class CudaMapping:
    """Made by ``open``, for one thread. No byte of it is trusted before ``changed`` was asked."""

    def __init__(self, pool: CudaPool, address: int, book: KvArena, owner: Owner) -> None:
        self.pool = pool
        self.num_blocks = book.num_blocks
        self.owner = owner
        self._address: int | None = address
        self._book = book
        self._theirs = regions(pool.layout, book.num_blocks)

    @classmethod
    def open(
        cls, pool: CudaPool, descriptor: ArenaDescriptor, stream: SideStream, probe: list[Bytes]
    ) -> "CudaMapping":
        """Map the pool described, and prove that copies out of it bring what is there.

        ``pool`` is this process's, ``probe`` two pinned pages.

        Raises:
            IncompatiblePeer: another layout, or a size that cannot fit it.
            NoPeerAccess: its GPU cannot be reached from ``pool``'s.
            TransferFailed: it is gone, CUDA refuses, or other memory is mapped than announced.
            DeviceLost: the copy of the self-test failed or hangs.
        """
        cuda = descriptor.cuda
        if cuda is None or cuda.handle is None:
            raise TransferFailed("the peer exports no GPU memory")
        if cuda.layout != pool.layout.fingerprint():
            raise IncompatiblePeer("the CUDA arena is of another layout than this model's")
        if descriptor.num_blocks < 1 or cuda.size != cuda_arena_size(
            pool.layout, descriptor.num_blocks
        ):
            raise IncompatiblePeer(
                f"the CUDA arena is announced with {descriptor.num_blocks} blocks in {cuda.size} "
                "bytes, which is not this model's layout"
            )
        pool.memory.require_access(cuda.unit)
        # The owner before its book: the book's random id shows that the process is the right one.
        owner = Owner(descriptor.pid)
        book: KvArena | None = None
        try:
            book = KvArena.open(descriptor, BOOK_LAYOUT)
            mapping = cls(pool, pool.memory.open(cuda.handle), book, owner)
        except BaseException:
            owner.close()
            if book is not None:
                book.close()
            raise
        try:
            mapping._prove(canary(descriptor.arena_id), stream, probe)
        except BaseException:
            mapping.close()
            raise
        return mapping

    def copy(
        self,
        stream: SideStream,
        layers: range,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
    ) -> int:
        """Queue copies of ``source_blocks[i]`` to the pool's ``target_blocks[i]``; the bytes.

        A run of neighbouring blocks is one copy over all layers of one shape. Otherwise as
        ``shared.kv.copy.copy_blocks``. Nothing has arrived before ``stream.wait``.

        Raises:
            TransferFailed: a layer or block does not exist, the lists differ in length, or CUDA
                refuses. What was queued before still runs.
        """
        assert self._address is not None
        require_places(
            layers,
            len(self.pool.layout.layers),
            (source_blocks, self.num_blocks),
            (target_blocks, self.pool.num_blocks),
        )
        runs = list(merge_runs(source_blocks, target_blocks))
        pairs = (
            pair
            for layer in layers
            if self.pool.layout.layers[layer].shares is None
            for pair in zip(self._theirs[layer], self.pool.regions[layer], strict=True)
        )
        copied = 0
        for stack in stacks(pairs):
            source, target = self._address + stack.source, self.pool.address + stack.target
            for start, to, count in runs:
                stream.copy_rows(
                    (target + to * stack.unit, stack.target_pitch),
                    (source + start * stack.unit, stack.source_pitch),
                    count * stack.unit,
                    stack.rows,
                )
                copied += count * stack.unit * stack.rows
        return copied

    def changed(self, blocks: Sequence[int], generations: Sequence[int]) -> list[int]:
        """Return the blocks that were used anew since ``generations`` was announced.

        To be asked AFTER the event of the copy has passed. Two things make an unchanged generation
        mean that the copied bytes are those announced: the owner moves it on before it writes, and
        its process had not begun to end, so that its memory was not somebody else's.

        Raises:
            TransferFailed: the owner is ending; what was copied may be anything.
        """
        if self.owner.ending():
            raise TransferFailed(f"process {self.owner.pid} ended while its KV was copied")
        return verify_generations(self._book, blocks, generations)

    def close(self) -> None:
        """Unmap, once no copy is queued. Idempotent."""
        address, self._address = self._address, None
        if address is None:
            return
        self._book.close()
        self.owner.close()
        self.pool.memory.shut(address)

    def _prove(self, expected: bytes, stream: SideStream, probe: list[Bytes]) -> None:
        """Bring the canary the way KV comes: device to device, and only then to the host."""
        assert self._address is not None
        blank, seen = (page[:PAGE] for page in probe)
        blank[:] = 0
        stream.copy(self.pool.probe_address, address_of(blank), PAGE)
        stream.copy(self.pool.probe_address, self._address, PAGE)
        stream.copy(address_of(seen), self.pool.probe_address, PAGE)
        stream.wait()
        if seen.tobytes() != expected:
            raise TransferFailed(
                "the mapped CUDA memory is another arena than announced (the owner restarted?), "
                "or copies between these GPUs bring wrong bytes"
            )
