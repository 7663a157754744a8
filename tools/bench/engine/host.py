"""What a decode step costs besides the model: schedule, pack, sample, messages."""

import os
import time
from collections.abc import Sequence

import msgspec

from shared.device.device import SharedKv
from shared.engine.batch import StepResult
from shared.engine.engine import Engine
from shared.errors import NumericalError
from shared.ids import DispatchId, HostId, Incarnation, RequestId, TenantId, WorkerId
from shared.kv.block_pool import BlockPool
from shared.messages.hello import Compatibility
from shared.messages.request import Request, Sampling
from shared.messages.router_worker import Run, ToWorker, WorkerWelcome
from shared.worker.effects import Effect, RunStep, ToRouter
from shared.worker.events import Event, RouterSaid, StepDone
from shared.worker.limits import WorkerIdentity, WorkerLimits
from shared.worker.live import storage_windows
from shared.worker.state import WorkerState
from tools.bench.engine.figures import CHUNK

_WARM_UP = 3
_TTL = 3600.0


class HostSide:
    """A worker's state machine around an engine, without sockets and without a second thread.

    ``arena``'s blocks must be nobody else's; what they hold is overwritten.
    """

    def __init__(self, engine: Engine, arena: SharedKv, batch: int) -> None:
        layout = engine.layout
        identity = WorkerIdentity(
            worker=WorkerId("bench-0"),
            incarnation=Incarnation(1),
            role="mixed",
            host=HostId("bench"),
            pid=os.getpid(),
            kv_endpoint="",
            compatibility=Compatibility(
                model=engine.model_id,
                kv_dtype=layout.dtype,
                block_size=layout.block_size,
                layout=layout.shape_fingerprint(),
            ),
            arena=arena.descriptor(),
        )
        limits = WorkerLimits(
            max_batch_tokens=CHUNK,
            max_sequences=batch,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            layers=len(layout.layers),
            windows=storage_windows(layout),
        )
        pool = BlockPool(arena.num_blocks, layout.block_size, prefix_cache=False)
        self._engine = engine
        self._batch = batch
        self._state = WorkerState(identity, limits, pool)
        self._encoder = msgspec.msgpack.Encoder()
        self._running: RunStep | None = None
        self._said(WorkerWelcome(incarnation=Incarnation(1)))

    def measure(
        self, prompts: Sequence[tuple[int, ...]], samplings: Sequence[Sampling], steps: int
    ) -> list[float]:
        """Return for each of ``steps`` steps of the whole batch its seconds less the model's.

        The engine forgets the sequences afterwards.

        Raises:
            NumericalError: the engine failed a sequence, or one ended before the last step.
        """
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            request = Request(
                request_id=RequestId(f"bench-{number}"),
                tenant=TenantId(""),
                prompt_ids=prompt,
                sampling=sampling,
                ttl=_TTL,
            )
            self._said(Run(dispatch=DispatchId(number), request=request))
        times: list[float] = []
        while len(times) < _WARM_UP + steps:
            step = self._running
            if step is None:
                raise NumericalError("a sequence ended before all steps were measured")
            whole = len(step.batch.sequences) == self._batch
            whole = whole and all(len(part.tokens) == 1 for part in step.batch.sequences)
            seconds = self._step(step)
            times += [seconds] if whole else []
        last = self._running
        if last is not None:
            keys = tuple(part.key for part in last.batch.sequences)
            self._engine.step(msgspec.structs.replace(last.batch, closed=keys, sequences=()))
        return times[_WARM_UP:]

    def _step(self, step: RunStep) -> float:
        """Run one step; return its seconds without those inside the model."""
        started, inside = time.perf_counter(), self._engine.model_seconds
        result: StepResult = self._engine.step(step.batch)
        self._event(StepDone(step.step, result, time.monotonic()))
        seconds = time.perf_counter() - started
        if result.failed:
            raise NumericalError(result.failed[0][1].message)
        return seconds - (self._engine.model_seconds - inside)

    def _said(self, message: ToWorker) -> None:
        self._event(RouterSaid(message))

    def _event(self, event: Event) -> None:
        """Handle one event; what it brings is encoded and dropped."""
        effects: list[Effect] = self._state.handle(event, time.monotonic())
        if isinstance(event, StepDone):
            self._running = None
        for effect in effects:
            if isinstance(effect, RunStep):
                self._running = effect
            elif isinstance(effect, ToRouter):
                self._encoder.encode(effect.message)


def samplings_of(kind: str, batch: int, max_tokens: int) -> list[Sampling]:
    """Return the sampling of each sequence: ``greedy``, or in turn what requests ask for."""
    options: list[dict[str, object]] = [{"temperature": 0.0}]
    if kind == "mixed":
        options += [
            {"temperature": 0.7},
            {"top_p": 0.9},
            {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
            {"min_p": 0.05},
            {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
            {"logit_bias": {11: -5.0, 12: 2.0}},
            {"temperature": 0.0, "logprobs": 5},
        ]
    return [
        msgspec.convert(
            {"seed": i, "max_tokens": max_tokens, **options[i % len(options)]}, Sampling
        )
        for i in range(batch)
    ]
