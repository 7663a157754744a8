"""The two threads of a worker: every order gets exactly one answer, whatever happens in it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.engine.batch import StepInput, StepResult
from shared.errors import NumericalError
from shared.fault_rules import CopyFault, FaultsSection
from shared.ids import Incarnation, WorkerId
from shared.kernels.kv_rows import from_rows
from shared.kv.arena import KvArena
from shared.kv.layout import KvDtype, KvLayout, LayerKv
from shared.transport.bulk.faults import FaultyCopies
from shared.worker.copier import Copier
from shared.worker.effects import Copy, RunStep
from shared.worker.events import (
    Copied,
    CopyFailed,
    Event,
    LayersWritten,
    SourceKey,
    SourceLost,
    StepDone,
    StepFailed,
)
from shared.worker.step_runner import StepRunner
from tests.conftest import RunAsync

SOURCE = SourceKey(WorkerId("prefill-0"), Incarnation(1))
LAYOUT = KvLayout(dtype="fp32", block_size=4, layers=(LayerKv(1, 2, 2), LayerKv(1, 2, 2)))


class FakeEngine:
    """Writes seven layers, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def step(self, batch: StepInput, on_layer: Callable[[int], None] | None = None) -> StepResult:
        if self._error is not None:
            raise self._error
        for layer in range(7):
            if on_layer is not None:
                on_layer(layer)
        return StepResult()


class OwnCores:
    """Notes when a worker's cores are its own; lends it one more."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def busy(self) -> None:
        self.said.append("busy")

    def rest(self) -> None:
        self.said.append("rest")

    def gather(self) -> int:
        return 1


class Inbox:
    """Collects events posted onto the loop."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = asyncio.Event()

    def post(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, count: int) -> list[Event]:
        while len(self.events) < count:
            self._changed.clear()
            await self._changed.wait()
        return self.events


async def run_steps(engine: FakeEngine, announce: tuple[int, ...], count: int) -> list[Event]:
    inbox = Inbox()
    with ThreadPoolExecutor(1) as thread:
        runner = StepRunner(engine, thread, inbox.post, OwnCores())
        runner.submit(RunStep(1, StepInput(), announce))
        return await inbox.until(count)


def test_cores_are_given_away_only_when_no_step_follows(run_async: RunAsync) -> None:
    """Between two steps of a prompt another worker must not settle on this one's cores."""

    async def two_steps() -> tuple[list[str], list[Event]]:
        cores, inbox = OwnCores(), Inbox()
        with ThreadPoolExecutor(1) as thread:

            def post(event: Event) -> None:
                inbox.post(event)
                if len(inbox.events) == 1:
                    runner.submit(RunStep(2, StepInput(), ()))

            runner = StepRunner(FakeEngine(), thread, post, cores)
            runner.submit(RunStep(1, StepInput(), ()))
            events = await inbox.until(2)
            await asyncio.sleep(0)
        return cores.said, events

    said, events = run_async(two_steps())
    assert said == ["busy", "busy", "rest"]
    assert [event.lent for event in events if isinstance(event, StepDone)] == [1, 1]


def test_layers_are_told_every_few_and_the_last_ones_before_the_end_of_the_step(
    run_async: RunAsync,
) -> None:
    events = run_async(run_steps(FakeEngine(), (3, 6, 7), 4))
    assert events[:3] == [LayersWritten(1, 3), LayersWritten(1, 6), LayersWritten(1, 7)]
    assert isinstance(events[3], StepDone)


def test_without_a_reader_no_layer_is_told(run_async: RunAsync) -> None:
    (done,) = run_async(run_steps(FakeEngine(), (), 1))
    assert isinstance(done, StepDone) and done.step == 1


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("shape"), "internal"), (NumericalError("NaN"), "numerical")]
)
def test_an_engine_that_raises_answers_all_the_same(
    run_async: RunAsync, error: Exception, code: str
) -> None:
    """Guards a worker that waits for ever for a step that died."""
    (failed,) = run_async(run_steps(FakeEngine(error), False, 1))
    assert isinstance(failed, StepFailed) and failed.error.code == code


def job(number: int, source_block: int, generation: int) -> Copy:
    """Return a copy job of one block, both layers, into block 1."""
    return Copy(
        job=number,
        source=SOURCE,
        first_layer=0,
        end_layer=2,
        source_blocks=(source_block,),
        generations=(generation,),
        target_blocks=(1,),  # type: ignore[arg-type]
    )


def test_copies_are_verified_and_every_job_is_answered(run_async: RunAsync) -> None:
    """Guards reused, missing and unmapped blocks being taken for good ones (32)."""
    theirs, ours = KvArena.create(LAYOUT, 3), KvArena.create(LAYOUT, 3)

    async def check() -> None:
        inbox = Inbox()
        copier = Copier(ours, inbox.post)
        copier.copy(job(1, 2, 7))
        copier.map_arena(SOURCE, theirs.descriptor())
        theirs.generations[2] = 7
        theirs.k(1)[2] = 5.0
        copier.copy(job(2, 2, 7))
        copier.copy(job(3, 2, 6))
        copier.copy(job(4, 9, 7))
        copier.unmap(SOURCE)
        copier.copy(job(5, 2, 7))
        unmapped, copied, reused, missing, again = await inbox.until(5)
        copier.close()
        assert isinstance(copied, Copied) and copied.job == 2
        assert copied.bytes == LAYOUT.block_bytes
        assert ours.k(1)[1].eq(5.0).all()
        failures = [unmapped, reused, missing, again]
        assert [f.job for f in failures if isinstance(f, CopyFailed)] == [1, 3, 4, 5]
        assert [f.reused for f in failures if isinstance(f, CopyFailed)] == [0, 1, 0, 0]

    run_async(check())
    theirs.close()
    ours.close()


def test_blocks_used_anew_between_copy_and_check_are_told(run_async: RunAsync) -> None:
    """Guards generations that are read before the copy: what came may be of the block's next
    life (32)."""
    theirs, ours = KvArena.create(LAYOUT, 3), KvArena.create(LAYOUT, 3)
    theirs.k(1)[2] = 5.0

    class Reuse(FaultyCopies):
        def after_copy(self, source_pid: int) -> str | None:
            assert ours.k(1)[1].eq(5.0).all(), "the bytes are there by now"
            theirs.generations[2] += 1
            return None

    async def check() -> None:
        inbox = Inbox()
        copier = Copier(ours, inbox.post, faults=Reuse(FaultsSection(), "decode-0"))
        copier.map_arena(SOURCE, theirs.descriptor())
        copier.copy(job(1, 2, 0))
        (failed,) = await inbox.until(1)
        copier.close()
        assert isinstance(failed, CopyFailed) and failed.reused == 1, failed

    run_async(check())
    theirs.close()
    ours.close()


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_copies_of_another_dtype_are_converted_and_verified(
    run_async: RunAsync, dtype: KvDtype
) -> None:
    """Guards fp32 bytes taken for others, and reused blocks once more where copies convert (32)."""
    theirs, ours = KvArena.create(LAYOUT, 3), KvArena.create(LAYOUT.with_dtype(dtype), 3)

    async def check() -> None:
        inbox = Inbox()
        copier = Copier(ours, inbox.post)
        copier.map_arena(SOURCE, theirs.descriptor())
        theirs.generations[2] = 7
        theirs.k(0)[2], theirs.v(1)[2] = 5.0, -0.5
        copier.copy(job(1, 2, 7))
        copier.copy(job(2, 2, 6))
        copied, reused = await inbox.until(2)
        copier.close()
        assert isinstance(copied, Copied) and copied.bytes == LAYOUT.block_bytes
        assert isinstance(reused, CopyFailed) and reused.reused == 1
        assert from_rows(ours.k(0)[1]).eq(5.0).all() and from_rows(ours.v(1)[1]).eq(-0.5).all()
        assert not ours.k(0)[2].any() and not from_rows(ours.k(1)[1]).any()

    run_async(check())
    theirs.close()
    ours.close()


@pytest.mark.parametrize(("kind", "words"), [("fail", "injected"), ("stale", "used 1 blocks anew")])
def test_harm_to_any_copy_is_a_named_failure_and_the_others_work(
    run_async: RunAsync, kind: str, words: str
) -> None:
    """Guards a copy being used although its check failed, whichever one it is (24, 32, 41)."""
    theirs, ours = KvArena.create(LAYOUT, 3), KvArena.create(LAYOUT, 3)

    async def check(copy: int) -> None:
        inbox = Inbox()
        fault = CopyFault(kind=kind, copy=copy)  # type: ignore[arg-type]
        faults = FaultyCopies(FaultsSection(copies=(fault,)), "decode-0")
        copier = Copier(ours, inbox.post, faults=faults)
        copier.map_arena(SOURCE, theirs.descriptor())
        for number in range(3):
            copier.copy(job(number, 2, 0))
        outcomes = await inbox.until(3)
        copier.close()
        for number, outcome in enumerate(outcomes):
            assert isinstance(outcome, CopyFailed if number == copy else Copied)
            assert isinstance(outcome, Copied) or words in outcome.error.message

    for copy in range(3):
        run_async(check(copy))
    theirs.close()
    ours.close()


def test_an_arena_that_cannot_be_mapped_loses_its_source(run_async: RunAsync) -> None:
    ours, theirs = KvArena.create(LAYOUT, 3), KvArena.create(LAYOUT, 3)
    gone = theirs.descriptor()
    theirs.close()

    async def check() -> None:
        inbox = Inbox()
        copier = Copier(ours, inbox.post)
        copier.map_arena(SOURCE, gone)
        (lost,) = await inbox.until(1)
        copier.close()
        assert isinstance(lost, SourceLost) and lost.error.code == "transfer_failed"

    run_async(check())
    ours.close()
