"""The one thread that reads peers' pools by NIXL, proves what came and puts it in place."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shared.errors import DiptychError, ErrorPayload, TransferFailed
from shared.kv.arena import HEADER_BYTES, KvArena, check_header, region_offsets
from shared.kv.copy import land_blocks, merge_runs
from shared.kv.layout import KvLayout
from shared.messages.prefill_decode import ArenaDescriptor, NixlDescriptor
from shared.transport.bulk.nixl import Piece
from shared.worker.effects import Copy
from shared.worker.events import Copied, CopyFailed, Event, SourceKey, SourceLost

log = logging.getLogger(__name__)

STAGING_BYTES: Final = 16 << 20
_GENERATION: Final = 8


class Reads(Protocol):
    """What is needed of ``NixlEnd``."""

    @property
    def staging(self) -> NDArray[np.uint8]: ...
    def meet(self, peer: NixlDescriptor) -> None: ...
    def forget(self, peer: NixlDescriptor) -> None: ...
    def read(self, peer: NixlDescriptor, pieces: Sequence[Piece], seconds: float) -> None: ...


class _Peer(Struct, frozen=True):
    nixl: NixlDescriptor
    arena: ArenaDescriptor
    layout: KvLayout
    regions: list[tuple[int, int]]


class _Landing(Struct, frozen=True):
    """A piece, and the blocks [``block``, ``block + count``) of the own pool it is for."""

    piece: Piece
    layer: int
    part: int
    block: int
    count: int


class NixlReader:
    """Does jobs in the order given and posts their outcome onto the loop, as ``Copier`` does.

    Bytes come to a staging buffer first. Then the blocks' generations are read: they move on
    before a block is written anew, so those announced mean that the bytes are. Only then the
    pool is written to. Against bytes spoiled on the way there is what the transport has.
    """

    def __init__(
        self,
        end: Reads,
        target: KvArena,
        post: Callable[[Event], None],
        *,
        seconds: float,
        met: Callable[[SourceKey], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = end
        self._target = target
        self._post = post
        self._seconds = seconds
        self._met = met
        self._peers: dict[SourceKey, _Peer] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nixl")

    def meet(self, source: SourceKey, arena: ArenaDescriptor, nixl: NixlDescriptor) -> None:
        """Read the header of a peer's pool: ``met`` is called, or failure is a ``SourceLost``."""
        self._thread.submit(self._meet, source, arena, nixl)

    def forget(self, source: SourceKey) -> None:
        """Drop a peer after the jobs already given."""
        self._thread.submit(self._forget, source)

    def copy(self, job: Copy) -> None:
        """Read, verify, put in place; answered by ``Copied`` or ``CopyFailed``."""
        self._thread.submit(self._copy, job)

    def close(self) -> None:
        """Finish the running job, drop the others and every peer, end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        for source in list(self._peers):
            self._forget(source)

    def _tell(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._post, event)

    def _meet(self, source: SourceKey, arena: ArenaDescriptor, nixl: NixlDescriptor) -> None:
        layout = self._target.layout.with_dtype(arena.dtype)
        try:
            self._end.meet(nixl)
            self._end.read(nixl, [Piece(nixl.address, 0, HEADER_BYTES)], self._seconds)
            header = self._end.staging[:HEADER_BYTES].tobytes()
            check_header(header, arena, layout, f"read from {source.worker}")
            regions = region_offsets(layout, arena.num_blocks)
            self._peers[source] = _Peer(nixl, arena, layout, regions)
            self._loop.call_soon_threadsafe(self._met, source)
        except DiptychError as error:
            self._tell(SourceLost(source, error.payload()))
        except Exception as error:
            log.exception("the self-test of %s failed", source.worker)
            self._tell(SourceLost(source, _failed(error)))

    def _forget(self, source: SourceKey) -> None:
        peer = self._peers.pop(source, None)
        if peer is not None:
            self._end.forget(peer.nixl)

    def _copy(self, job: Copy) -> None:
        begun = time.monotonic()
        try:
            peer = self._peers.get(job.source)
            if peer is None:
                raise TransferFailed(f"the KV of {job.source.worker} is not reachable")
            _require_blocks(job, peer.arena.num_blocks, self._target.num_blocks)
            copied = reused = 0
            for batch in _batches(self._landings(peer, job), self._room(peer)):
                reused = self._fetch(peer, job, batch)
                if reused:
                    break
                copied += sum(landing.piece.size for landing in batch)
        except DiptychError as error:
            self._tell(CopyFailed(job.job, error.payload()))
        except Exception as error:
            log.exception("copy job %d failed", job.job)
            self._tell(CopyFailed(job.job, _failed(error)))
        else:
            if reused:
                text = f"{job.source.worker} used {reused} blocks anew while they were read"
                self._tell(CopyFailed(job.job, TransferFailed(text).payload(), reused))
                return
            seconds = time.monotonic() - begun
            self._tell(Copied(job.job, copied, seconds, wire_bytes=copied))

    def _room(self, peer: _Peer) -> int:
        """Return the bytes of staging that are left once the generations have theirs."""
        return self._end.staging.size - _GENERATION * peer.arena.num_blocks

    def _landings(self, peer: _Peer, job: Copy) -> Iterator[_Landing]:
        """Yield runs of neighbouring blocks, none larger than the staging buffer."""
        layout, room = peer.layout, self._room(peer)
        runs = list(merge_runs(job.source_blocks, job.target_blocks))
        for layer in range(job.first_layer, job.end_layer):
            if layout.owner(layer) != layer:
                continue
            units = layout.k_block_bytes(layer), layout.v_block_bytes(layer)
            for part, (offset, unit) in enumerate(zip(peer.regions[layer], units, strict=True)):
                most = max(1, room // unit)
                for start, to, count in runs:
                    for done in range(0, count, most):
                        blocks = min(most, count - done)
                        address = peer.nixl.address + offset + (start + done) * unit
                        piece = Piece(address, 0, blocks * unit)
                        yield _Landing(piece, layer, part, to + done, blocks)

    def _fetch(self, peer: _Peer, job: Copy, batch: Sequence[_Landing]) -> int:
        """Read a batch and put it in place; return how many blocks were used anew instead."""
        self._end.read(peer.nixl, [landing.piece for landing in batch], self._seconds)
        known = self._generations(peer, job.source_blocks)
        reused = int(np.count_nonzero(known != np.array(job.generations, dtype=np.uint64)))
        if reused:
            return reused
        staging = self._end.staging
        for landing in batch:
            bytes_ = staging[landing.piece.at : landing.piece.at + landing.piece.size]
            self._land(peer, landing, bytes_)
        return 0

    def _land(self, peer: _Peer, landing: _Landing, bytes_: NDArray[np.uint8]) -> None:
        blocks = range(landing.block, landing.block + landing.count)
        if peer.layout == self._target.layout:
            target = self._target.raw(landing.layer)[landing.part]
            target[blocks.start : blocks.stop] = bytes_.reshape(landing.count, -1)
        else:
            place = (landing.layer, landing.part)
            land_blocks(bytes_, peer.layout, self._target, place, blocks)

    def _generations(self, peer: _Peer, blocks: Sequence[int]) -> NDArray[np.uint64]:
        first, last = min(blocks), max(blocks)
        at = self._room(peer)
        size = _GENERATION * (last + 1 - first)
        address = peer.nixl.address + HEADER_BYTES + _GENERATION * first
        self._end.read(peer.nixl, [Piece(address, at, size)], self._seconds)
        table: NDArray[np.uint64] = self._end.staging[at : at + size].copy().view(np.uint64)
        wanted: NDArray[np.uint64] = table[np.array(blocks) - first]
        return wanted


def _require_blocks(job: Copy, theirs: int, ours: int) -> None:
    """Check that only what is in the pools is read and written. Raises ``TransferFailed``."""
    source, target = job.source_blocks, job.target_blocks
    if not source or not len(source) == len(target) == len(job.generations):
        raise TransferFailed("the lists of blocks differ in length")
    if not (0 <= min(source) <= max(source) < theirs and 0 <= min(target) <= max(target) < ours):
        raise TransferFailed(f"a block is not in a pool of {theirs} or {ours} blocks")


def _batches(landings: Iterator[_Landing], room: int) -> Iterator[list[_Landing]]:
    """Give each landing its place in the staging buffer; yield what fits at once."""
    batch: list[_Landing] = []
    used = 0
    for landing in landings:
        size = landing.piece.size
        if batch and used + size > room:
            yield batch
            batch, used = [], 0
        placed = Piece(landing.piece.address, used, size)
        batch.append(_Landing(placed, landing.layer, landing.part, landing.block, landing.count))
        used += size
    if batch:
        yield batch


def _failed(error: Exception) -> ErrorPayload:
    return TransferFailed(f"reading KV failed: {type(error).__name__}: {error}").payload()
