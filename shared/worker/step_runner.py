"""Runs steps on the one thread that touches the model."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from shared.engine.batch import StepInput, StepResult
from shared.errors import DiptychError, ErrorPayload
from shared.worker.effects import RunStep
from shared.worker.events import Event, LayersWritten, StepDone, StepFailed

log = logging.getLogger(__name__)


class Steps(Protocol):
    """What this thread needs of ``shared.engine.engine.Engine``."""

    def step(
        self, batch: StepInput, on_layer: Callable[[int], None] | None = None
    ) -> StepResult: ...


class Cores(Protocol):
    """What this thread needs of ``shared.worker.crew.Crew``."""

    def busy(self) -> None: ...
    def rest(self) -> None: ...
    def gather(self) -> int: ...


class StepRunner:
    """Posts what becomes of each step onto the loop; ``thread`` runs them in order."""

    def __init__(
        self,
        engine: Steps,
        thread: ThreadPoolExecutor,
        post: Callable[[Event], None],
        cores: Cores,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._post = post
        self._engine = engine
        self._thread = thread
        self._cores = cores
        self._open = 0

    def submit(self, effect: RunStep) -> None:
        """Run a step; answered by ``StepDone`` or ``StepFailed``."""
        self._open += 1
        self._cores.busy()
        self._thread.submit(self._run, effect)

    def _run(self, effect: RunStep) -> None:
        event: Event
        try:
            lent = self._cores.gather()
            result = self._engine.step(
                effect.batch, self._on_layer(effect) if effect.announce else None
            )
            event = StepDone(effect.step, result, time.monotonic(), lent)
        except Exception as error:
            log.exception("engine step %d failed", effect.step)
            event = StepFailed(effect.step, _payload(error))
        self._loop.call_soon_threadsafe(self._done, event)

    def _done(self, event: Event) -> None:
        """Have the event handled; that may submit the next step, else the cores are free."""
        self._open -= 1
        self._post(event)
        if self._open == 0:
            self._cores.rest()

    def _on_layer(self, effect: RunStep) -> Callable[[int], None]:
        """Tell the loop of layers as the effect says, of the last while sampling still runs."""
        ends = frozenset(effect.announce)

        def written(layer: int) -> None:
            if layer + 1 in ends:
                self._loop.call_soon_threadsafe(self._post, LayersWritten(effect.step, layer + 1))

        return written


def _payload(error: Exception) -> ErrorPayload:
    if isinstance(error, DiptychError):
        return error.payload()
    text = f"the engine failed: {type(error).__name__}: {error}"
    return ErrorPayload(code="internal", message=text)
