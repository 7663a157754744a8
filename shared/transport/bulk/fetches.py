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

    The chunks of a job are divided among ``sockets`` connections. A job that got no chunk for
    ``stall`` seconds asks again, ``attempts`` times in all; so often, too, each of its chunks may
    arrive spoiled. A source that was silent all that time fails with all its jobs.
    """

    slots: int = 16
    stall: float = 2.0
    attempts: int = 4
    sockets: int = 1


class Send(Struct, Generic[Source], frozen=True):
    """Send to a source over connection number ``lane``."""

    source: Source
    message: FromReader
    lane: int = 0


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


class _Whole(Struct):
    """A job's parts that are not over, by their number on the wire."""

    parts: set[int]
    begun: float
    again: int = 0
    spoiled: int = 0

    def count(self, job: "_Job[Source]") -> None:
        """Add what a part that is over has seen."""
        self.again += job.again
        self.spoiled += sum(job.spoiled.values())


class _Job(Struct, Generic[Source]):
    """One part of a job, which goes over one connection: what the source takes for a job."""

    source: Source
    fetch: Fetch
    whole: int
    lane: int
    missing: set[int]
    progress: float
    attempt: int = 0
    granted: int = 0
    again: int = 0
    spoiled: dict[int, int] = {}
    why: str = "no chunk arrived"


class Fetches(Generic[Source]):
    """All jobs of one reader. ``take`` returns what is to be sent and which jobs are over.

    With several connections a job is divided into as many parts, each with a number and a credit
    of its own on the wire (``job_of``). A part that gets nothing goes on over the next connection,
    and new jobs leave the silent one out for a while.

    Credit is a promise of a slot, so at most ``slots`` chunks of current attempts are on
    their way. One source gets at most half of the slots (if there are two), so that one that
    hangs does not stop the others; its connections share that evenly.
    """

    def __init__(self, limits: FetchLimits) -> None:
        self._limits = limits
        self._per_source = max(1, limits.slots // 2)
        self._per_lane = max(1, self._per_source // limits.sockets)
        self._batch = max(1, self._per_lane // 4)
        self._wholes: dict[int, _Whole] = {}
        self._silent: dict[tuple[Source, int], float] = {}
        self._jobs: dict[int, _Job[Source]] = {}
        self._heard: dict[Source, float] = {}
        self._out: list[Send[Source] | Done | Failed] = []
        self._begun = 0
        self.late = 0
        self.spoiled = 0

    def __len__(self) -> int:
        return len(self._wholes)

    def job_of(self, number: int) -> int:
        """Return the job that a number on the wire is of."""
        return number // self._limits.sockets

    def take(self) -> list[Send[Source] | Done | Failed]:
        """Return and forget the effects so far, in order."""
        out, self._out = self._out, []
        return out

    def begin(self, source: Source, fetch: Fetch, chunks: int, now: float) -> None:
        """Queue a job of ``chunks`` chunks; ``need``, ``attempt`` and ``credit`` are set here."""
        if chunks == 0:
            self._out.append(Done(fetch.job, 0, 0.0))
            return
        lanes = self._lanes(source, now)[:chunks]
        whole = self._wholes[fetch.job] = _Whole(set(), now)
        for index, lane in enumerate(lanes):
            number = fetch.job * self._limits.sockets + index
            share = range(index * chunks // len(lanes), (index + 1) * chunks // len(lanes))
            part = replace(fetch, job=number)
            self._jobs[number] = _Job(source, part, fetch.job, lane, set(share), now, spoiled={})
            whole.parts.add(number)
        self._heard.setdefault(source, now)
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
            self._complete(found, now)
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
        self._end(found, _error(message.message), message.reused)
        self._grant(now)

    def lost(self, source: Source, error: ErrorPayload, now: float) -> None:
        """The source is gone: its jobs are over."""
        for job in [j for j in self._jobs.values() if j.source == source]:
            if job.fetch.job in self._jobs:
                self._end(job, error)
        self._grant(now)

    def tick(self, now: float) -> None:
        """Ask again for what did not come in time, or give up."""
        seconds = self._limits.stall * self._limits.attempts
        for key in [key for key, until in self._silent.items() if until <= now]:
            del self._silent[key]
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
            self._change_lane(job, now + seconds)
            self._start(job, min(self._room(job), len(job.missing)) or 1, now)
        self._grant(now)

    def check(self) -> None:
        """Slots and credits agree. Raises ``AssertionError``."""
        granted = sum(job.granted for job in self._jobs.values())
        # A restarted or spoiled job may hold one slot although none is free.
        assert granted <= self._limits.slots + len(self._jobs), "more credit than slots"
        for job in self._jobs.values():
            assert job.missing, "a finished job is still there"
            assert job.granted >= 0, "a slot came back twice"
            assert job.fetch.job in self._wholes[job.whole].parts, "a part of no job"
        parts = sum(len(whole.parts) for whole in self._wholes.values())
        assert parts == len(self._jobs), "a job waits for a part that is over"

    def _slot_back(self, job: _Job[Source], attempt: int) -> None:
        if attempt == job.attempt and job.granted:
            job.granted -= 1

    def _room(self, wanting: _Job[Source]) -> int:
        free, mine, lane = self._limits.slots, self._per_source, self._per_lane
        for job in self._jobs.values():
            free -= job.granted
            if job.source == wanting.source:
                mine -= job.granted
                lane -= job.granted if job.lane == wanting.lane else 0
        return max(0, min(free, mine, lane))

    def _lanes(self, source: Source, now: float) -> list[int]:
        """Return the connections for a new job, if possible without those that are silent.

        Each job begins with another one: a small job needs fewer than there are.
        """
        lanes = range(self._limits.sockets)
        heard = [lane for lane in lanes if self._silent.get((source, lane), now) <= now]
        heard = heard or list(lanes)
        first = self._begun % len(heard)
        self._begun += 1
        return heard[first:] + heard[:first]

    def _change_lane(self, job: _Job[Source], until: float) -> None:
        """Leave a connection that brought nothing."""
        if self._limits.sockets > 1:
            self._silent[job.source, job.lane] = until
            self._cancel(job)
            job.lane = (job.lane + 1) % self._limits.sockets

    def _grant(self, now: float) -> None:
        """Give free slots to the jobs in the order they came."""
        for job in self._jobs.values():
            wanted = len(job.missing) - job.granted
            room = min(wanted, self._room(job)) if wanted else 0
            if room < 1 or (job.attempt and room < min(wanted, self._batch)):
                continue
            if job.attempt == 0:
                self._start(job, room, now)
            else:
                job.granted += room
                number = job.fetch.job
                credit = Credit(job=number, attempt=job.attempt, chunks=room)
                self._out.append(Send(job.source, credit, job.lane))

    def _start(self, job: _Job[Source], credit: int, now: float) -> None:
        job.attempt += 1
        job.granted = credit
        job.progress = now
        self._ask(job, tuple(_ranges(job.missing)), credit)

    def _ask(self, job: _Job[Source], need: tuple[tuple[int, int], ...], credit: int) -> None:
        message = replace(job.fetch, attempt=job.attempt, need=need, credit=credit)
        self._out.append(Send(job.source, message, job.lane))

    def _cancel(self, job: _Job[Source]) -> None:
        self._out.append(Send(job.source, CancelFetch(job=job.fetch.job), job.lane))

    def _fail(self, job: _Job[Source], why: str) -> None:
        self._cancel(job)
        self._end(job, _error(why))

    def _hear(self, source: Source, now: float) -> None:
        if source in self._heard:
            self._heard[source] = now

    def _complete(self, job: _Job[Source], now: float) -> None:
        """A part is complete, and perhaps its job."""
        whole = self._wholes[job.whole]
        whole.count(job)
        whole.parts.discard(job.fetch.job)
        self._remove(job)
        if not whole.parts:
            del self._wholes[job.whole]
            seconds = now - whole.begun
            self._out.append(Done(job.whole, whole.again, seconds, spoiled=whole.spoiled))

    def _end(self, job: _Job[Source], error: ErrorPayload, reused: int = 0) -> None:
        """A part failed and with it the job: the other parts are not wanted any more."""
        whole = self._wholes.pop(job.whole)
        for part in [self._jobs[number] for number in whole.parts]:
            if part is not job and part.attempt:
                self._cancel(part)
            whole.count(part)
            self._remove(part)
        failed = Failed(job.whole, error, reused, again=whole.again, spoiled=whole.spoiled)
        self._out.append(failed)

    def _remove(self, job: _Job[Source]) -> None:
        del self._jobs[job.fetch.job]
        if all(other.source != job.source for other in self._jobs.values()):
            del self._heard[job.source]


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
