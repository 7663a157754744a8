"""Copies on a stream of their own: beside the default stream, on which a worker computes.

One thread queues copies and waits for them. Waiting polls the event with a deadline: a call that
blocks in the driver would have none.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

from shared.errors import DeviceLost, TransferFailed

NON_BLOCKING: Final = 1
"""Such a stream does not wait for the default one, nor the default one for it."""
_NO_TIMING: Final = 2
_BY_ADDRESS: Final = 4
"""cudaMemcpyDefault: unified addresses say on which device, or in which memory, both ends lie."""
_NOT_READY: Final = 600
"""No error (CUDA programming guide, error checking): it does not stay behind as the thread's last
one, which torch would find after its next kernel."""
_POLL: Final = 20e-6
_SHORT: Final = 200e-6
PATIENCE: Final = 30.0
"""Seconds for copies of some MiB before the device is taken for hung."""


class Mark:
    """A point in a stream, recorded anew each time it is used."""

    def __init__(self, stream: "SideStream", event: int) -> None:
        self._stream = stream
        self._event = event
        self._pending = False

    def record(self) -> None:
        """Mark what has been queued so far."""
        self._stream.record(self._event)
        self._pending = True

    def wait(self) -> None:
        """Return once what was queued before the mark is done; at once if nothing was marked.

        Raises:
            DeviceLost: it failed, or takes too long. What it copies to must not be used again.
        """
        if self._pending:
            self._stream.wait_for(self._event)
            self._pending = False


class SideStream:
    """One stream of ``cuda:index``; ``lost`` is told, in the using thread, when it fails."""

    def __init__(
        self,
        runtime: Any,  # noqa: ANN401 - ``cupy.cuda.runtime`` is not typed
        index: int,
        lost: Callable[[DeviceLost], None],
        *,
        patience: float = PATIENCE,
    ) -> None:
        self._runtime = runtime
        self._index = index
        self._lost = lost
        self._patience = patience
        runtime.setDevice(index)
        self._stream: int | None = int(runtime.streamCreateWithFlags(NON_BLOCKING))
        self._events: list[int] = []
        self._end = self.mark()

    def mark(self) -> Mark:
        """Return a new mark, which lives as long as the stream."""
        self._runtime.setDevice(self._index)
        self._events.append(int(self._runtime.eventCreateWithFlags(_NO_TIMING)))
        return Mark(self, self._events[-1])

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy between two addresses, after all that was queued before.

        Raises:
            TransferFailed: CUDA does not take it; what was queued before still runs.
        """
        self._runtime.setDevice(self._index)
        try:
            self._runtime.memcpyAsync(target, source, size, _BY_ADDRESS, self._stream)
        except RuntimeError as error:
            raise TransferFailed(f"cuda:{self._index} copies no KV: {error}") from error

    def copy_rows(
        self, target: tuple[int, int], source: tuple[int, int], width: int, rows: int
    ) -> None:
        """Queue a copy of ``rows`` rows of ``width`` bytes; both ends are address and pitch.

        Raises:
            TransferFailed: as ``copy``.
        """
        if rows == 1:
            self.copy(target[0], source[0], width)
            return
        self._runtime.setDevice(self._index)
        try:
            self._runtime.memcpy2DAsync(*target, *source, width, rows, _BY_ADDRESS, self._stream)
        except RuntimeError as error:
            raise TransferFailed(f"cuda:{self._index} copies no KV: {error}") from error

    def wait(self) -> None:
        """Return once everything queued is done.

        Raises:
            DeviceLost: as ``Mark.wait``.
        """
        self._end.record()
        self._end.wait()

    def record(self, event: int) -> None:
        """Put the event at the end of what is queued. For marks."""
        self._runtime.setDevice(self._index)
        try:
            self._runtime.eventRecord(event, self._stream)
        except RuntimeError as error:
            raise self._failed(f"{error}") from error

    def wait_for(self, event: int) -> None:
        """Poll until the event has passed. For marks."""
        begun = time.monotonic()
        while (status := int(self._runtime.eventQuery(event))) == _NOT_READY:
            waited = time.monotonic() - begun
            if waited > self._patience:
                raise self._failed(f"copies did not end in {self._patience:g} s")
            # The kernel rounds short sleeps up to what copying a chunk takes; 0 only yields.
            time.sleep(0 if waited < _SHORT else _POLL)
        if status:
            raise self._failed(f"copies failed with CUDA error {status}")

    def close(self) -> None:
        """Give stream and marks back; CUDA lets what is queued run to its end. Idempotent."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        with contextlib.suppress(RuntimeError):  # a device that failed answers every call so
            self._runtime.setDevice(self._index)
            for event in self._events:
                self._runtime.eventDestroy(event)
            self._runtime.streamDestroy(stream)

    def _failed(self, why: str) -> DeviceLost:
        error = DeviceLost(
            f"cuda:{self._index} has failed: {why}; the worker ends, since nobody can say what "
            "its copies still write"
        )
        self._lost(error)
        return error
