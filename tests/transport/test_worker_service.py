"""The worker's shell in this process: what makes it give up, and that it gives up cleanly."""

import asyncio
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq

from shared.config import Deployment, ModelSection, WorkerSection, WorkersSection
from shared.device.device import SharedKv
from shared.engine.batch import Sampled, StepInput, StepResult
from shared.errors import DeviceLost, ErrorPayload, IncompatiblePeer
from shared.ids import DispatchId, Incarnation
from shared.kv.arena import KvArena
from shared.kv.layout import KvLayout, LayerKv
from shared.messages.request import TokenLogprob
from shared.messages.router_worker import (
    FromWorker,
    Run,
    SequenceFailed,
    StepOutput,
    ToWorker,
    WorkerHello,
    WorkerRefused,
    WorkerWelcome,
)
from shared.service import ServiceFailed
from shared.transport.link import RouterLink
from shared.worker.events import Event
from shared.worker.pool_size import shortage
from shared.worker.service import WorkerService
from shared.worker.settings import Threads, WorkerSettings, worker_settings
from tests.conftest import RunAsync
from tests.transport.harness import short_directory
from tests.transport.worker_rig import request
from tests.unit.device_pair import cuda_pool
from tests.unit.fake_cupy import FakeRuntime

LAYOUT = KvLayout(dtype="fp32", block_size=4, layers=(LayerKv(1, 2, 2),))


class FakeEngine:
    """Samples token 5, or raises in the first ``failures`` steps."""

    layout = LAYOUT
    model_id = "fake"
    vocab_size = 100
    max_model_len = 64
    eos_token_ids = (2,)

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures

    def step(self, batch: StepInput, on_layer: Callable[[int], None] | None = None) -> StepResult:
        if self.failures:
            self.failures -= 1
            raise ValueError("made up")
        return StepResult(sampled=tuple(Sampled(s.key, 5) for s in batch.sequences if s.sample))


@pytest.fixture
def settings() -> Iterator[WorkerSettings]:
    directory = short_directory()
    deployment = Deployment(
        name="d",
        deployment_type="colocated",
        model=ModelSection(block_size=4),
        workers=WorkersSection(mixed=WorkerSection()),
        runtime_dir=str(directory),
    )
    yield worker_settings(deployment, None, ("mixed",))
    shutil.rmtree(directory)


async def serve(
    settings: WorkerSettings,
    engine: FakeEngine,
    answer: Callable[[FromWorker], list[ToWorker]],
    spoil: Callable[[WorkerService], None] = lambda service: None,
    pool: SharedKv | None = None,
) -> None:
    """Run the service against a router that answers each message with ``answer``."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def on_message(peer: bytes, message: FromWorker) -> None:
        for reply in answer(message):
            link.send(peer, reply)

    link: RouterLink[FromWorker, ToWorker] = RouterLink(
        context, settings.router_endpoint, FromWorker, on_message
    )
    arena = pool or KvArena.create(LAYOUT, 8)
    stop = asyncio.Event()
    try:
        with ThreadPoolExecutor(1) as thread:
            service = WorkerService(settings, engine, arena, thread, Threads(1, 1))  # type: ignore[arg-type]
            spoil(service)
            await service.run(stop)
    finally:
        link.close()
        context.term()
        arena.close()


def sends(number: int) -> Callable[[FromWorker], list[ToWorker]]:
    """Answer hello with welcome and ``number`` requests, each after the other's failure."""
    left = iter(range(1, number + 1))

    def next_run() -> list[ToWorker]:
        dispatch = next(left, None)
        if dispatch is None:
            return []
        return [Run(dispatch=DispatchId(dispatch), request=request((3, 4), 1))]

    def answer(message: FromWorker) -> list[ToWorker]:
        match message:
            case WorkerHello():
                return [WorkerWelcome(incarnation=Incarnation(1)), *next_run()]
            case StepOutput():
                return next_run()
            case _:
                return []

    return answer


@pytest.mark.keeps("memory", "fds")  # the tracebacks in the captured log hold the arena
def test_an_engine_that_fails_three_steps_in_a_row_ends_the_process(
    run_async: RunAsync, settings: WorkerSettings
) -> None:
    """Guards a worker that stays in rotation while it fails everything."""
    failed: list[SequenceFailed] = []
    answers = sends(3)

    def answer(message: FromWorker) -> list[ToWorker]:
        if isinstance(message, StepOutput):
            failed.extend(message.failed)
        return answers(message)

    with pytest.raises(ServiceFailed, match="3 steps in a row"):
        run_async(serve(settings, FakeEngine(failures=9), answer))
    assert [f.error.code for f in failed[:2]] == ["internal", "internal"]
    assert not list(Path(settings.runtime_dir).glob("*.ready"))
    assert not list(Path(settings.runtime_dir).glob("*.sock"))


def test_a_worker_that_the_router_refuses_ends_with_its_sentence(
    run_async: RunAsync, settings: WorkerSettings
) -> None:
    refusal = ErrorPayload(code="incompatible_peer", message="model: 'a' here, 'b' there")
    with pytest.raises(IncompatiblePeer, match="model: 'a' here"):
        run_async(serve(settings, FakeEngine(), lambda _: [WorkerRefused(error=refusal)]))


@pytest.mark.keeps("memory", "fds")  # the tracebacks in the captured log hold the arena
def test_a_state_machine_that_breaks_ends_the_process(
    run_async: RunAsync, settings: WorkerSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a zombie that answers heartbeats and does nothing else."""

    def spoil(service: WorkerService) -> None:
        def handle(event: Event, now: float) -> list[object]:
            raise KeyError("lost")

        service.state.handle = handle  # type: ignore[assignment,method-assign]

    with pytest.raises(ServiceFailed, match="lost"):
        run_async(serve(settings, FakeEngine(), sends(1), spoil))
    assert "lost track of its work" in caplog.text


def test_blocks_that_are_unaccounted_for_at_idle_end_the_process(
    run_async: RunAsync, settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a slow leak that ends in a full pool while health is green (22)."""
    monkeypatch.setattr("shared.worker.service._IDLE_BEFORE_CHECK", 3)

    def spoil(service: WorkerService) -> None:
        service.state._pool.allocate(1)

    with pytest.raises(ServiceFailed, match="lost track of blocks"):
        run_async(serve(settings, FakeEngine(), sends(0), spoil))


class WordyEngine(FakeEngine):
    """Scores the tokens of its first sequence with more candidates than fit a message."""

    first: int | None = None

    def step(self, batch: StepInput, on_layer: Callable[[int], None] | None = None) -> StepResult:
        self.first = batch.sequences[0].key if self.first is None else self.first
        score = TokenLogprob(-1.0, tuple((i, -1.0) for i in range(400)))
        return StepResult(
            sampled=tuple(
                Sampled(s.key, 5, score if s.key == self.first else None)
                for s in batch.sequences
                if s.sample
            )
        )


def test_output_larger_than_a_message_costs_its_request_and_not_the_worker(
    run_async: RunAsync, settings: WorkerSettings
) -> None:
    """The worker took it for a router that is gone, and exited."""
    output: list[StepOutput] = []
    refusal = ErrorPayload(code="incompatible_peer", message="that is all")

    def answer(message: FromWorker) -> list[ToWorker]:
        match message:
            case WorkerHello():
                runs = [Run(dispatch=DispatchId(i), request=request((3, 4), 6)) for i in (1, 2)]
                return [WorkerWelcome(incarnation=Incarnation(1)), *runs]
            case StepOutput():
                output.append(message)
                return [WorkerRefused(error=refusal)] if message.finished else []
            case _:
                return []

    def spoil(service: WorkerService) -> None:
        service._links.router._codec._max_frame = 1500

    with pytest.raises(IncompatiblePeer, match="that is all"):
        run_async(serve(settings, WordyEngine(), answer, spoil))
    failed = [(f.dispatch, f.error.code) for part in output for f in part.failed]
    assert failed == [(1, "too_large")]
    tokens = [t.dispatch for part in output for t in part.tokens]
    assert tokens == [2] * 6


def test_a_gpu_whose_copies_fail_ends_the_worker(
    run_async: RunAsync, settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a worker that answers heartbeats and never again a transfer, also if it hangs."""
    alarms: list[int] = []
    monkeypatch.setattr(signal, "alarm", alarms.append)
    runtime = FakeRuntime()
    pool = cuda_pool(runtime, layout=LAYOUT)

    def spoil(service: WorkerService) -> None:
        stream = pool.side_stream()
        runtime.fails["eventQuery"] = 700
        with pytest.raises(DeviceLost):
            stream.wait()
        stream.close()

    with pytest.raises(ServiceFailed, match="cuda:0 has failed: copies failed with CUDA error 700"):
        run_async(serve(settings, FakeEngine(), sends(0), spoil, pool))
    assert alarms == [10]
    assert not runtime.streams and not runtime.pinned
    pool.arena.close()


@pytest.mark.parametrize("scratch", [0, 1])
def test_a_pool_smaller_than_the_longest_request_is_named_at_the_start(
    run_async: RunAsync,
    settings: WorkerSettings,
    caplog: pytest.LogCaptureFixture,
    scratch: int,
) -> None:
    """Guards an operator who learns of a too small `kv_memory` from the first long request."""
    size = (8 + scratch) * LAYOUT.block_bytes
    small = msgspec.structs.replace(settings, kv_memory=size)
    over = WorkerRefused(error=ErrorPayload(code="incompatible_peer", message="that is all"))
    with pytest.raises(IncompatiblePeer, match="that is all"):
        run_async(serve(small, FakeEngine(), lambda _: [over]))
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "`workers.mixed.kv_memory` of " in warning
    assert "holds 32 tokens, and a request may have 64" in warning
    assert "longer ones than it holds are refused" in warning
    assert "set it to 1MiB, or `model.max_model_len` to 32" in warning


def test_the_size_that_the_warning_names_is_enough(settings: WorkerSettings) -> None:
    """Guards advice that leads to the same warning at the next start."""
    large = KvLayout(dtype="fp32", block_size=16, layers=(LayerKv(64, 64, 64),))
    given = msgspec.structs.replace(settings, kv_memory=1 << 20)
    told = shortage(given, large, 2, 100)
    assert told is not None and "of 1 MiB holds 32 tokens" in told
    alike = shortage(msgspec.structs.replace(given, role="prefill"), large, 2, 100)
    assert alike is not None and "longer prompts than it holds are left to decode" in alike
    needed = int(told.partition("set it to ")[2].partition("MiB")[0]) << 20
    assert needed == 4 << 20
    given = msgspec.structs.replace(settings, kv_memory=needed)
    assert shortage(given, large, needed // large.block_bytes, 100) is None
