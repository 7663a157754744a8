"""The prefill worker's half of the ``host`` path: who gets which chunk next. Pure."""

from collections import deque
from collections.abc import Collection

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shared.kv.layout import KvLayout
from shared.messages.bulk import CancelFetch, Credit, Fetch, FetchRefused
from shared.transport.bulk.payload import chunk_blocks
from shared.transport.bulk.plan import MAX_CHUNK, PlannedChunk, plan_fetch

_MAX_JOBS = 4096
_MAX_PER_PEER = 1024


class Next(Struct, frozen=True):
    """The chunk to send now. It touches ``blocks``, whose announced generations are ``told``."""

    peer: bytes
    fetch: Fetch
    index: int
    chunk: PlannedChunk
    blocks: NDArray[np.int64]
    told: NDArray[np.uint64]


class _Serving(Struct):
    peer: bytes
    fetch: Fetch
    plan: tuple[PlannedChunk, ...]
    queue: deque[int]
    credit: int
    heard: float
    blocks: NDArray[np.int64]
    told: NDArray[np.uint64]


class Servings:
    """Jobs of all readers, served in turn as far as their credit reaches."""

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        arena: int,
        idle: float = 60.0,
        codecs: Collection[str] = (),
    ) -> None:
        self._layout = layout
        self._codecs = codecs
        self._num_blocks = num_blocks
        self._arena = arena
        self._idle = idle
        self._jobs: dict[tuple[bytes, int], _Serving] = {}
        self._turns: deque[tuple[bytes, int]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def sendable(self) -> bool:
        """True while some chunk could be sent."""
        return bool(self._turns)

    def fetch(self, peer: bytes, message: Fetch, now: float) -> FetchRefused | None:
        """Take a job or more of it in, or say why not."""
        key = (peer, message.job)
        job = self._jobs.get(key)
        if job is not None and message.attempt < job.fetch.attempt:
            return None
        refusal = self._refusal(peer, message, known=job is not None)
        if refusal is not None:
            self.drop(peer, message.job)
            return refusal
        if job is None or message.attempt > job.fetch.attempt:
            job = self._jobs[key] = _Serving(
                peer,
                message,
                plan_fetch(self._layout, message),
                deque(),
                0,
                now,
                np.array(message.blocks, dtype=np.int64),
                np.array(message.generations, dtype=np.uint64),
            )
        for first, end in message.need:
            if not 0 <= first < end <= len(job.plan):
                self.drop(peer, message.job)
                return _refuse(message, "invalid", f"no chunks {first}..{end} in {len(job.plan)}")
        queued = set(job.queue)
        wanted = (i for first, end in message.need for i in range(first, end))
        job.queue.extend(index for index in wanted if index not in queued)
        self._credit(job, message.credit, now)
        return None

    def credit(self, peer: bytes, message: Credit, now: float) -> None:
        """More room at the reader; of an unknown job it means nothing."""
        job = self._jobs.get((peer, message.job))
        if job is not None and job.fetch.attempt == message.attempt:
            self._credit(job, message.chunks, now)

    def cancel(self, peer: bytes, message: CancelFetch) -> None:
        """Forget a job."""
        self.drop(peer, message.job)

    def drop(self, peer: bytes, job: int) -> None:
        """Forget a job; an unknown one is fine."""
        self._jobs.pop((peer, job), None)

    def drop_peer(self, peer: bytes) -> None:
        """Forget every job of a reader that is gone."""
        for key in [key for key in self._jobs if key[0] == peer]:
            del self._jobs[key]

    def expire(self, now: float) -> int:
        """Forget jobs whose reader was silent for long; return how many."""
        old = [key for key, job in self._jobs.items() if now - job.heard > self._idle]
        for key in old:
            del self._jobs[key]
        return len(old)

    def next(self) -> Next | None:
        """Return the next chunk and use up its credit; a job sent to its end is forgotten."""
        while self._turns:
            key = self._turns.popleft()
            job = self._jobs.get(key)
            if job is None or not job.queue or job.credit < 1:
                continue
            index = job.queue.popleft()
            job.credit -= 1
            if not job.queue:
                del self._jobs[key]
            elif job.credit:
                self._turns.append(key)
            chunk = job.plan[index]
            part = chunk_blocks(chunk, len(job.blocks))
            return Next(job.peer, job.fetch, index, chunk, job.blocks[part], job.told[part])
        return None

    def _credit(self, job: _Serving, chunks: int, now: float) -> None:
        job.heard = now
        job.credit += max(0, chunks)
        key = (job.peer, job.fetch.job)
        if job.queue and job.credit and key not in self._turns:
            self._turns.append(key)

    def _refusal(self, peer: bytes, message: Fetch, *, known: bool) -> FetchRefused | None:
        if message.arena != self._arena:
            return _refuse(message, "arena", "the worker was restarted: its KV from before is gone")
        layers = len(self._layout.layers)
        good = (
            0 <= message.first_layer <= message.end_layer <= layers
            and len(message.blocks) == len(message.generations)
            and all(0 <= block < self._num_blocks for block in message.blocks)
            and min(message.generations, default=0) >= 0
            and 1 <= message.chunk_bytes <= MAX_CHUNK
        )
        if not good:
            return _refuse(message, "invalid", "the fetch names what is not in the pool")
        if message.codec != "none":
            whole = len(message.blocks) * self._layout.block_size
            if message.codec not in self._codecs:
                return _refuse(message, "invalid", f"no codec {message.codec!r} here")
            if not whole - self._layout.block_size < message.tokens <= whole:
                why = f"{message.tokens} tokens in {len(message.blocks)} blocks"
                return _refuse(message, "invalid", why)
        mine = sum(1 for key in self._jobs if key[0] == peer)
        if not known and (len(self._jobs) >= _MAX_JOBS or mine >= _MAX_PER_PEER):
            return _refuse(message, "overloaded", "too many KV fetches are open")
        return None


def _refuse(message: Fetch, reason: str, why: str) -> FetchRefused:
    return FetchRefused(
        job=message.job,
        attempt=message.attempt,
        reason=reason,  # type: ignore[arg-type]
        message=why,
    )
