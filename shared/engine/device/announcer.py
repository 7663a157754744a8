"""Telling that a layer's KV is written, on a device that works behind this thread's back."""

from collections import deque
from collections.abc import Callable

from shared.device.device import Event
from shared.engine.step import OnLayer


class Announcer:
    """Calls ``on_layer`` once per layer and in order, each after its KV is in memory.

    Launching goes on meanwhile: a layer is told at the next occasion after its event.
    """

    def __init__(self, on_layer: OnLayer, mark: Callable[[], Event]) -> None:
        self._on_layer = on_layer
        self._mark = mark
        self._waiting: deque[tuple[int, Event]] = deque()

    def written(self, layer: int) -> None:
        """Note that all writes to this layer have been launched."""
        self._waiting.append((layer, self._mark()))
        while self._waiting and self._waiting[0][1].query():
            self._on_layer(self._waiting.popleft()[0])

    def finish(self) -> None:
        """Wait for the layers that have not been told."""
        while self._waiting:
            layer, event = self._waiting.popleft()
            event.synchronize()
            self._on_layer(layer)
