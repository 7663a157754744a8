"""Calls that give one answer, as futures; both clients wait on these."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Literal, TypeVar

from diptych.channel import Channel
from diptych.errors import DiptychError, error_from
from diptych.events import Ask, Fleet, Open, Ready, Update
from diptych.open_request import Failed
from diptych.results import Assembler, Completion
from diptych.wire import Submit, WorkerOrder

T = TypeVar("T")


class _Once(Generic[T]):
    """Resolves a future that may be cancelled by another thread at any moment."""

    def __init__(self) -> None:
        self.future: Future[T] = Future()
        self._lock = threading.Lock()
        self._settled = False

    def claim(self) -> bool:
        """Tell whether the caller is the one to set the result."""
        with self._lock:
            if self._settled:
                return False
            self._settled = True
        return self.future.set_running_or_notify_cancel()

    def on_cancel(self, stop: Callable[[], None]) -> None:
        def watch(future: Future[T]) -> None:
            if future.cancelled():
                self.claim()
                stop()

        self.future.add_done_callback(watch)


def complete(channel: Channel, key: int, submit: Submit, timeout: float) -> Future[Completion]:
    """Run a request; cancelling the future cancels the request everywhere."""
    once: _Once[Completion] = _Once()
    assembler = Assembler()

    def sink(update: Update) -> None:
        try:
            assembler.feed(update)
        except DiptychError as error:
            if once.claim():
                once.future.set_exception(error)
        else:
            if assembler.completion is not None and once.claim():
                once.future.set_result(assembler.completion)

    once.on_cancel(lambda: channel.abort(key))
    channel.start(Open(key, submit, time.monotonic() + timeout), sink)
    return once.future


def ask(
    channel: Channel,
    key: int,
    what: Literal["ready", "status"],
    timeout: float,
    order: WorkerOrder | None = None,
) -> Future[Ready | Fleet]:
    """Wait for a session, or ask for the fleet's status after giving it an order."""
    once: _Once[Ready | Fleet] = _Once()

    def sink(update: Update) -> None:
        if not once.claim():
            return
        if isinstance(update, Failed):
            once.future.set_exception(error_from(update.error))
        elif isinstance(update, Ready | Fleet):
            once.future.set_result(update)

    once.on_cancel(lambda: channel.abort(key))
    channel.start(Ask(key, what, time.monotonic() + timeout, order), sink)
    return once.future
