"""The reader's half of the ``host`` path: slots, credits, retries, deadlines. Pure."""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from shared.errors import ErrorPayload
from shared.messages.bulk import CancelFetch, Credit, Fetch, FetchRefused, FromReader

Source = TypeVar("Source", bound=Hashable)


class FetchLimits(Struct, frozen=True, kw_only=True):
    """``slots`` chunks may be on their way to this reader at once, over all sources.

    A job that got no chunk for ``stall`` seconds asks again, ``attempts`` times in all; so
    often, too, each of its chunks may arrive spoiled. A source that was silent all that time
    fails with all its jobs.
    """

    slots: int = 16
    stall: float = 2.0
    attempts: int = 4


class Send(Struct, Generic[Source], frozen=True):
    """Send to a source."""

    source: Source
    message: FromReader


class Done(Struct, frozen=True):
    """Every chunk of the job has landed.

    ``again`` chunks had to be asked for once more, ``spoiled`` did not verify.
    """

    job: int
    again: int
    seconds: float
    spoiled: int = 0


class Failed(Struct, frozen=True):
    """The job is over and what it brought is void. ``again`` and ``spoiled`` as in ``Done``."""

    job: int
    error: ErrorPayload
    reused: int = 0
    again: int = 0
    spoiled: int = 0


class _Job(Struct, Generic[Source]):
    source: Source
    fetch: Fetch
    missing: set[int]
    begun: float
    progress: float
    attempt: int = 0
    granted: int = 0
    again: int = 0
    spoiled: dict[int, int] = {}
    why: str = "no chunk arrived"


class Fetches(Generic[Source]):
    """All jobs of one reader. ``take`` returns what is to be sent and which jobs are over.

    Credit is a promise of a slot, so at most ``slots`` chunks of current attempts are on
    their way. One source gets at most half of the slots (if there are two), so that one that
    hangs does not stop the others.
    """

    def __init__(self, limits: FetchLimits) -> None:
        self._limits = limits
        self._per_source = max(1, limits.slots // 2)
        self._batch = max(1, self._per_source // 4)
        self._jobs: dict[int, _Job[Source]] = {}
        self._heard: dict[Source, float] = {}
        self._out: list[Send[Source] | Done | Failed] = []
        self.late = 0
        self.spoiled = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def take(self) -> list[Send[Source] | Done | Failed]:
        """Return and forget the effects so far, in order."""
        out, self._out = self._out, []
        return out

    def begin(self, source: Source, fetch: Fetch, chunks: int, now: float) -> None:
        """Queue a job of ``chunks`` chunks; ``need``, ``attempt`` and ``credit`` are set here."""
        job = _Job(source, fetch, set(range(chunks)), now, now, spoiled={})
        self._jobs[fetch.job] = job
        self._heard.setdefault(source, now)
        if chunks == 0:
            self._end(job, Done(fetch.job, again=0, seconds=0.0))
        self._grant(now)

    def wants(self, source: Source, job: int, index: int) -> bool:
        """Return whether that chunk of a job of this source is still missing."""
        found = self._jobs.get(job)
        return found is not None and found.source == source and index in found.missing

    def arrived(self, source: Source, job: int, attempt: int, now: float) -> None:
        """A chunk that nobody wants any more came: late, double, or of an unknown job."""
        self.late += 1
        self._hear(source, now)
        found = self._jobs.get(job)
        if found is not None and found.source == source:
            self._slot_back(found, attempt)
            self._grant(now)

    def landed(self, job: int, attempt: int, index: int, now: float) -> None:
        """A wanted chunk was verified and copied."""
        found = self._jobs[job]
        self._hear(found.source, now)
        found.missing.discard(index)
        found.progress = now
        self._slot_back(found, attempt)
        if not found.missing:
            self._end(found, Done(job, found.again, now - found.begun))
        self._grant(now)

    def bad(self, job: int, attempt: int, index: int, why: str, now: float) -> None:
        """A wanted chunk did not verify: ask for it again, or give up."""
        found = self._jobs[job]
        self._hear(found.source, now)
        self.spoiled += 1
        found.progress = now
        found.why = why
        found.spoiled[index] = found.spoiled.get(index, 0) + 1
        self._slot_back(found, attempt)
        if found.spoiled[index] >= self._limits.attempts:
            self._fail(found, f"chunk {index} {why} {self._limits.attempts} times")
        elif attempt == found.attempt:
            found.again += 1
            found.granted += 1
            self._ask(found, ((index, index + 1),), 1)
        self._grant(now)

    def refused(self, source: Source, message: FetchRefused, now: float) -> None:
        """The source cannot serve the job."""
        found = self._jobs.get(message.job)
        if found is None or found.source != source or message.attempt != found.attempt:
            self.late += 1
            return
        self._end(found, Failed(message.job, _error(message.message), message.reused))
        self._grant(now)

    def lost(self, source: Source, error: ErrorPayload, now: float) -> None:
        """The source is gone: its jobs are over."""
        for job in [j for j in self._jobs.values() if j.source == source]:
            self._end(job, Failed(job.fetch.job, error))
        self._grant(now)

    def tick(self, now: float) -> None:
        """Ask again for what did not come in time, or give up."""
        seconds = self._limits.stall * self._limits.attempts
        for job in list(self._jobs.values()):
            started = job.attempt > 0 and job.fetch.job in self._jobs
            if not started or now - job.progress < self._limits.stall:
                continue
            if job.attempt >= self._limits.attempts:
                why = f"{job.why}; {len(job.missing)} chunks are missing after {seconds:g} s"
                self._fail(job, why)
                if now - self._heard.get(job.source, now) >= seconds:
                    self.lost(job.source, _error(f"nothing came for {seconds:g} s"), now)
                continue
            job.again += job.granted
            job.granted = 0
            self._start(job, min(self._room(job.source), len(job.missing)) or 1, now)
        self._grant(now)

    def check(self) -> None:
        """Slots and credits agree. Raises ``AssertionError``."""
        granted = sum(job.granted for job in self._jobs.values())
        # A restarted or spoiled job may hold one slot although none is free.
        assert granted <= self._limits.slots + len(self._jobs), "more credit than slots"
        for job in self._jobs.values():
            assert job.missing, "a finished job is still there"
            assert job.granted >= 0, "a slot came back twice"

    def _slot_back(self, job: _Job[Source], attempt: int) -> None:
        if attempt == job.attempt and job.granted:
            job.granted -= 1

    def _room(self, source: Source) -> int:
        free = self._limits.slots - sum(job.granted for job in self._jobs.values())
        mine = sum(job.granted for job in self._jobs.values() if job.source == source)
        return max(0, min(free, self._per_source - mine))

    def _grant(self, now: float) -> None:
        """Give free slots to the jobs in the order they came."""
        for job in self._jobs.values():
            wanted = len(job.missing) - job.granted
            room = min(wanted, self._room(job.source))
            if room < 1 or (job.attempt and room < min(wanted, self._batch)):
                continue
            if job.attempt == 0:
                self._start(job, room, now)
            else:
                job.granted += room
                number = job.fetch.job
                credit = Credit(job=number, attempt=job.attempt, chunks=room)
                self._out.append(Send(job.source, credit))

    def _start(self, job: _Job[Source], credit: int, now: float) -> None:
        job.attempt += 1
        job.granted = credit
        job.progress = now
        self._ask(job, tuple(_ranges(job.missing)), credit)

    def _ask(self, job: _Job[Source], need: tuple[tuple[int, int], ...], credit: int) -> None:
        message = replace(job.fetch, attempt=job.attempt, need=need, credit=credit)
        self._out.append(Send(job.source, message))

    def _fail(self, job: _Job[Source], why: str) -> None:
        self._out.append(Send(job.source, CancelFetch(job=job.fetch.job)))
        self._end(job, Failed(job.fetch.job, _error(why)))

    def _hear(self, source: Source, now: float) -> None:
        if source in self._heard:
            self._heard[source] = now

    def _end(self, job: _Job[Source], outcome: Done | Failed) -> None:
        del self._jobs[job.fetch.job]
        if all(other.source != job.source for other in self._jobs.values()):
            del self._heard[job.source]
        spoiled = sum(job.spoiled.values())
        self._out.append(replace(outcome, again=job.again, spoiled=spoiled))


def _ranges(numbers: set[int]) -> Iterator[tuple[int, int]]:
    start = end = -1
    for number in sorted(numbers):
        if number == end:
            end += 1
            continue
        if end > start:
            yield start, end
        start, end = number, number + 1
    if end > start:
        yield start, end


def _error(why: str) -> ErrorPayload:
    return ErrorPayload(
        code="transfer_failed", message=f"the KV did not arrive: {why}", retryable=True
    )
