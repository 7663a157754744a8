"""The worker process: sockets, engine thread and copy thread around ``WorkerState``."""

import asyncio
import logging
import os
import signal
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from shared.clock import MonotonicClock
from shared.device.cuda_pool import CudaPool
from shared.device.cuda_stage import CudaLift
from shared.device.device import SharedKv
from shared.engine.engine import Engine
from shared.engine.model_files import resolve_model
from shared.engine.weights import read_config
from shared.errors import DeviceLost, DiptychError, IncompatiblePeer
from shared.ids import new_incarnation
from shared.kernels.ops import place_threads
from shared.kv.block_pool import BlockPool
from shared.messages.hello import Compatibility
from shared.messages.router_worker import CancelWork, FromWorker, StepOutput, WorkerHello
from shared.precision import slow_precision
from shared.runtime import host_id
from shared.service import ReadyFile, ServiceFailed
from shared.telemetry.bounded_log import BoundedLog
from shared.transport.bulk.faults import FaultyCopies
from shared.transport.bulk.fetches import FetchLimits
from shared.transport.bulk.nixl import NixlEnd
from shared.transport.bulk.reader import ReaderLimits
from shared.transport.bulk.stage import in_memory
from shared.worker.core_board import CoreBoard
from shared.worker.crew import Crew
from shared.worker.effects import (
    CloseSource,
    ConnectSource,
    Copy,
    Effect,
    Exit,
    MapArena,
    Note,
    RunStep,
    ToReader,
    ToRouter,
    ToSource,
)
from shared.worker.events import (
    Event,
    ReaderLost,
    RouterSaid,
    StepDone,
    StepFailed,
    StopRequested,
    Tick,
)
from shared.worker.hardware import hardware_line
from shared.worker.limits import WorkerIdentity, WorkerLimits
from shared.worker.links import Links, routing_id
from shared.worker.live import storage_windows
from shared.worker.loading import load_engine
from shared.worker.movers import Extras, Movers
from shared.worker.nixl_reader import STAGING_BYTES
from shared.worker.oversize import divide
from shared.worker.pool_size import shortage
from shared.worker.settings import Threads, WorkerSettings, threads_for
from shared.worker.state import WorkerState
from shared.worker.step_runner import StepRunner

log = logging.getLogger(__name__)

_TICK = 0.1
_TICKS_OF_A_SECOND = 10
_FAILED_STEPS_IN_A_ROW = 3
_IDLE_BEFORE_CHECK = 30
_LAST_SECONDS = 10
_SLABS = 2
"""Chunks staged out of a GPU's memory, as a multiple of a reader's window. A reader has half its
window at one source at most, so it takes four that hang to hold the others up."""


async def run_worker(settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Load the model, serve until stopped and drained.

    Raises:
        DiptychError: configuration or resources are wrong; nothing was started.
        ServiceFailed: the engine keeps failing.
    """
    os.sched_setaffinity(0, settings.cores)
    log.info("%s loads %s", settings.worker, settings.model)
    slow = slow_precision(settings.precision, settings.role, settings.device)
    if slow is not None:
        log.warning(slow)
    with ThreadPoolExecutor(1, thread_name_prefix="engine") as thread:
        loop = asyncio.get_running_loop()
        model_dir = await loop.run_in_executor(thread, resolve_model, settings.model)
        threads = threads_for(settings, read_config(model_dir))
        engine, arena = await loop.run_in_executor(
            thread, load_engine, settings, model_dir, threads.own
        )
        try:
            cuda = arena.descriptor().cuda
            unit = None if cuda is None else cuda.unit
            ask = partial(hardware_line, settings.cores, settings.device, unit)
            log.info("%s runs on %s", settings.worker, await loop.run_in_executor(thread, ask))
            if not stop.is_set():
                await WorkerService(settings, engine, arena, thread, threads).run(stop)
        finally:
            thread.shutdown(wait=True, cancel_futures=True)
            engine.detach()
            arena.close()


class WorkerService:
    """Turns messages, steps and copies into events, and effects into messages, steps, copies."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        arena: SharedKv,
        thread: ThreadPoolExecutor,
        threads: Threads,
    ) -> None:
        self._settings = settings
        self._clock = MonotonicClock()
        self._warnings = BoundedLog(log)
        self._queue: deque[Event] = deque()
        self._failed_steps = 0
        self._idle_ticks = 0
        self._ticks = 0
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._incarnation = new_incarnation()
        self._ready = ReadyFile(Path(settings.runtime_dir), settings.worker)
        self._announced = False
        self._nixl = _nixl_end(settings, routing_id(settings.worker, self._incarnation), arena)
        identity = self._identity(engine, arena)
        limits = _limits(settings, engine, arena)
        short = shortage(settings, engine.layout, arena.num_blocks, engine.max_model_len)
        if short is not None:
            log.warning(short)
        pool = BlockPool(
            arena.num_blocks,
            settings.block_size,
            generations=arena.generations,
            prefix_cache=settings.prefix_cache,
        )
        self.state = WorkerState(identity, limits, pool)
        self._links = Links(
            routing_id(settings.worker, self._incarnation),
            settings.kv_endpoint,
            settings.router_endpoint,
            settings.security,
            self.post,
            settings.transfer.sockets,
        )
        self._movers = self._movers_for(arena, identity)
        self._board = CoreBoard(Path(settings.runtime_dir), settings.index, settings.shares)
        crew = Crew(threads.own, threads.most, self._board, place_threads)
        self._engine = StepRunner(engine, thread, self.post, crew)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until the state machine says that it is over."""
        beat = asyncio.create_task(self._beat(stop))
        try:
            await asyncio.wait((self._over, beat), return_when=asyncio.FIRST_COMPLETED)
            if beat.done():
                beat.result()
            self._over.result()
        finally:
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)
            self._ready.remove()
            self._movers.close()
            if self._nixl is not None:
                self._nixl.close()
            self._links.close()
            self._board.close()
            log.info("%s has ended", self._settings.worker)

    def post(self, event: Event) -> None:
        """Handle an event, and those its effects bring, one after the other."""
        self._queue.append(event)
        if len(self._queue) > 1 or self._over.done():
            return
        try:
            while self._queue:
                self._count(self._queue[0])
                for effect in self.state.handle(self._queue[0], self._clock.now()):
                    self._perform(effect)
                self._queue.popleft()
        except Exception as error:
            log.exception("%s lost track of its work", self._settings.worker)
            self._end(ServiceFailed(f"{self._settings.worker}: {error!r}"))

    def _perform(self, effect: Effect) -> None:
        match effect:
            case RunStep():
                self._engine.submit(effect)
            case ToRouter():
                self._to_router(effect.message)
            case ToReader():
                if not self._links.readers.send(effect.peer, effect.message):
                    self._queue.append(ReaderLost(effect.peer))
            case ConnectSource():
                self._links.connect(effect.source, effect.endpoint)
            case ToSource():
                self._links.to_source(effect.source, effect.message)
            case MapArena():
                if self._movers.same_host(effect):
                    self._links.watch(effect.source, effect.arena)
                self._movers.open(effect)
            case CloseSource():
                self._movers.close_source(effect.source)
                self._links.disconnect(effect.source)
            case Copy():
                self._movers.copy(effect)
            case Note():
                self._warnings.warning(effect.text)
            case Exit():
                refused = IncompatiblePeer(effect.error or "the router refused this worker")
                self._end(refused if effect.refused else None)

    def _to_router(self, message: FromWorker) -> None:
        """Send; what is too large costs its dispatch, a router that takes nothing the process."""
        link = self._links.router
        if link.send(message) or isinstance(message, WorkerHello):
            return
        if link.fits(message):
            self._end(ServiceFailed("the router takes no messages any more"))
        elif isinstance(message, StepOutput):
            parts, lost = divide(message, link.fits)
            log.error("dispatches %s failed: their output fits no message", lost)
            for part in parts:
                self._to_router(part)
            self._queue.extend(RouterSaid(CancelWork(dispatch=dispatch)) for dispatch in lost)
        else:
            log.error("a message larger than the router takes was dropped: %s", type(message))

    async def _beat(self, stop: asyncio.Event) -> None:
        """Tick until cancelled; the stop signal becomes an event, too."""
        told = False
        while True:
            rejected = self._links.rejected + self._movers.rejected
            self.post(Tick(rejected, self._movers.spoiled))
            self._watch_over()
            if stop.is_set() and not told:
                told = True
                log.info("%s stops: finishing what is open", self._settings.worker)
                self.post(StopRequested())
            await asyncio.sleep(_TICK)

    def _watch_over(self) -> None:
        """Write the ready file once welcomed; recompute the invariants when idle for long."""
        if self.state.welcomed and not self._announced:
            self._announced = True
            self._ready.write(self._incarnation)
            log.info("%s is ready", self._settings.worker)
        self._ticks += 1
        if self._ticks % _TICKS_OF_A_SECOND == 0:
            self._board.refresh()
            self._warnings.flush()
        self._idle_ticks = self._idle_ticks + 1 if self.state.idle else 0
        if self._idle_ticks == _IDLE_BEFORE_CHECK:
            try:
                self.state.check()
            except AssertionError as error:
                self._end(ServiceFailed(f"{self._settings.worker} lost track of blocks: {error}"))

    def _count(self, event: Event) -> None:
        """Give up when the engine fails again and again."""
        if isinstance(event, StepDone):
            self._failed_steps = 0
        elif isinstance(event, StepFailed):
            self._failed_steps += 1
            if self._failed_steps == _FAILED_STEPS_IN_A_ROW:
                self._end(ServiceFailed(f"the engine failed {self._failed_steps} steps in a row"))

    def _end(self, error: Exception | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _device_lost(self, error: DeviceLost) -> None:
        """End the process; told by whichever thread copies.

        A device that hangs holds up the orderly end, too: torch waits for it when the arena is let
        go. Then the kernel ends the process.
        """
        signal.alarm(_LAST_SECONDS)
        self._loop.call_soon_threadsafe(self._end, ServiceFailed(error.message))

    def _identity(self, engine: Engine, arena: SharedKv) -> WorkerIdentity:
        settings = self._settings
        return WorkerIdentity(
            worker=settings.worker,
            incarnation=self._incarnation,
            role=settings.role,
            host=host_id(),
            pid=os.getpid(),
            kv_endpoint=settings.kv_advertised,
            compatibility=Compatibility(
                model=engine.model_id,
                kv_dtype=engine.layout.dtype,
                block_size=engine.layout.block_size,
                layout=engine.layout.shape_fingerprint(),
                layers=engine.layout.layers,
            ),
            arena=arena.descriptor(),
            path=settings.transfer.path,
            codec="none" if isinstance(arena, CudaPool) else settings.transfer.codec,
            nixl=None if self._nixl is None else self._nixl.descriptor,
            bulk_endpoint=None if settings.transfer.path == "ipc" else settings.bulk_advertised,
        )

    def _movers_for(self, arena: SharedKv, identity: WorkerIdentity) -> Movers:
        """Open what KV bytes need; what is open already is closed on failure."""
        settings, transfer = self._settings, self._settings.transfer
        try:
            stage: CudaLift | None = None
            if isinstance(arena, CudaPool):
                arena.when_lost(self._device_lost)
            if identity.bulk_endpoint is not None:
                if isinstance(arena, CudaPool):
                    stage = CudaLift(arena, _SLABS * transfer.window, transfer.chunk_size)
                self._links.serve(settings.bulk_endpoint, arena, settings.faults, stage)
            return Movers(
                arena,
                self.post,
                host=identity.host,
                identity=routing_id(settings.worker, self._incarnation),
                security=settings.security,
                limits=ReaderLimits(
                    chunk_bytes=transfer.chunk_size,
                    fetch=FetchLimits(
                        slots=transfer.window,
                        stall=transfer.stall_timeout,
                        sockets=transfer.sockets,
                    ),
                ),
                extras=Extras(_copy_faults(settings), self._nixl),
            )
        except BaseException:
            self._links.close()
            raise


def _nixl_end(settings: WorkerSettings, name: bytes, arena: SharedKv) -> NixlEnd | None:
    if settings.transfer.path != "nixl":
        return None
    try:
        return NixlEnd(name.decode(), in_memory(arena), STAGING_BYTES)
    except DiptychError as error:
        log.warning("%s; KV travels by host", error.message)
        return None


def _copy_faults(settings: WorkerSettings) -> FaultyCopies | None:
    faults = settings.faults
    if faults is None or not faults.copies:
        return None
    log.warning("%d faults are injected into copies of KV (`faults:`)", len(faults.copies))
    return FaultyCopies(faults, settings.worker)


def _limits(settings: WorkerSettings, engine: Engine, arena: SharedKv) -> WorkerLimits:
    return WorkerLimits(
        max_batch_tokens=settings.max_batch_tokens,
        max_sequences=settings.max_sequences,
        max_model_len=min(engine.max_model_len, arena.num_blocks * settings.block_size),
        vocab_size=engine.vocab_size,
        layers=len(engine.layout.layers),
        windows=storage_windows(engine.layout),
        pipeline=settings.pipeline,
        notify_layers=settings.notify_layers,
        token_bytes=engine.layout.token_bytes,
        lease=settings.lease,
        heartbeat=settings.heartbeat,
        drain_timeout=settings.drain_timeout,
        router_silence=settings.router_silence,
    )
