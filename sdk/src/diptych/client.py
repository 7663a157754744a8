"""The blocking client."""

import queue
import sys
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import TracebackType
from typing import Literal, Self, TypeVar, Unpack, overload

from diptych import calls
from diptych.batch import BatchPlan, Outcome, ProgressBar
from diptych.channel import Channel
from diptych.endpoint import Curve
from diptych.errors import DiptychError, Timeout
from diptych.events import Fleet, Open, Ready, Update
from diptych.params import (
    Messages,
    Params,
    Prompt,
    chat_submit,
    check_timeout,
    prompt_submit,
)
from diptych.results import Assembler, Chunk, Completion
from diptych.state import ClientLimits
from diptych.wire import Role, Submit, WorkerOrder

T = TypeVar("T")

_GRACE = 5.0
"""Seconds past a call's deadline after which the I/O thread is taken for dead."""


class Client:
    """A connection to a Diptych gateway for use from threads.

    It connects in the background and reconnects by itself; a request in progress then goes on
    where it was, with no token lost or doubled. All methods may be called from any thread.

    Args:
        endpoint: ``ipc:///…`` or ``tcp://host:port``; default: the local deployment.
        api_key: key of a tenant, where the gateway asks for one.
        curve: encryption keys, required for other machines.
        timeout: seconds for a whole request, where a call gives none.
        connect_timeout: seconds to wait for a gateway before a call fails.
        reconnect_timeout: the same for requests that were already accepted.

    Raises:
        InvalidRequest: the endpoint cannot work.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        api_key: str | None = None,
        curve: Curve | None = None,
        timeout: float = 600.0,
        connect_timeout: float = 10.0,
        reconnect_timeout: float = 60.0,
    ) -> None:
        limits = ClientLimits(
            connect_timeout=check_timeout(connect_timeout),
            reconnect_timeout=check_timeout(reconnect_timeout),
        )
        self._timeout = check_timeout(timeout)
        self._channel = Channel.open(endpoint, api_key, curve, limits)
        self._finalizer = weakref.finalize(self, self._channel.close)

    def wait_ready(self, timeout: float = 60.0) -> Ready:
        """Wait until a gateway answers; returns ``model`` and ``max_model_len`` (tokens).

        Raises:
            ConnectionLost, Unauthorized, IncompatibleGateway, Timeout.
        """
        limit = check_timeout(timeout)
        with self._channel.call() as key:
            answer = _result(calls.ask(self._channel, key, "ready", limit), limit)
        assert isinstance(answer, Ready)
        return answer

    def status(self, timeout: float = 10.0) -> dict[str, object]:
        """Return the fleet's status: workers, queues, counters. For operators.

        Raises:
            Unauthorized: the key is not an operator's. Others as ``wait_ready``.
        """
        return self._ask_fleet(None, timeout)

    def drain(
        self, worker: str, *, role: Role | None = None, timeout: float = 10.0
    ) -> dict[str, object]:
        """Have a worker finish what it runs and get nothing new. For operators.

        With ``role``, which may be its own, it takes that role once it is empty; this also
        ends an earlier drain. Returns the fleet's status at once, without waiting for that.

        Raises:
            NotFound: there is no such worker. Others as ``status``.
        """
        return self._ask_fleet(WorkerOrder(worker=worker, role=role), timeout)

    def _ask_fleet(self, order: WorkerOrder | None, timeout: float) -> dict[str, object]:
        limit = check_timeout(timeout)
        with self._channel.call() as key:
            answer = _result(calls.ask(self._channel, key, "status", limit, order), limit)
        assert isinstance(answer, Fleet)
        return answer.decode()

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        timeline: bool = False,
        **params: Unpack[Params],
    ) -> Completion:
        """Complete a prompt (text or token ids) and return the whole output.

        ``timeout`` is in seconds for everything; ``timeline`` asks for phase times; for the
        rest see ``Params``.

        Raises:
            InvalidRequest, Unauthorized, Overloaded, Timeout, ConnectionLost, ServerError.
        """
        return self._run(prompt_submit(prompt, params, timeline), timeout)

    def chat(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,
        timeline: bool = False,
        **params: Unpack[Params],
    ) -> Completion:
        """Answer a chat; see ``generate``."""
        return self._run(chat_submit(messages, params, timeline), timeout)

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        timeline: bool = False,
        **params: Unpack[Params],
    ) -> "Stream":
        """Complete a prompt and iterate over the output as it comes; see ``generate``."""
        return Stream(self, prompt_submit(prompt, params, timeline), self._limit(timeout))

    def chat_stream(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,
        timeline: bool = False,
        **params: Unpack[Params],
    ) -> "Stream":
        """Answer a chat and iterate over the output as it comes; see ``generate``."""
        return Stream(self, chat_submit(messages, params, timeline), self._limit(timeout))

    def submit(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        timeline: bool = False,
        **params: Unpack[Params],
    ) -> Future[Completion]:
        """Start a completion and return at once; ``Future.cancel`` cancels the request.

        Callbacks of the future run in the client's I/O thread and must not block.
        """
        submit, limit = prompt_submit(prompt, params, timeline), self._limit(timeout)
        with self._channel.call() as key:
            return calls.complete(self._channel, key, submit, limit)

    @overload
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_in_flight: int = 32,
        progress: bool = True,
        return_exceptions: Literal[False] = False,
        timeout: float | None = None,
        **params: Unpack[Params],
    ) -> list[Completion]: ...
    @overload
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_in_flight: int = 32,
        progress: bool = True,
        return_exceptions: Literal[True],
        timeout: float | None = None,
        **params: Unpack[Params],
    ) -> list[Outcome]: ...
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_in_flight: int = 32,
        progress: bool = True,
        return_exceptions: bool = False,
        timeout: float | None = None,
        **params: Unpack[Params],
    ) -> list[Completion] | list[Outcome]:
        """Complete many prompts, ``max_in_flight`` at a time; results are in their order.

        *Overloaded* answers are tried again within the prompt's ``timeout``. The first other
        error cancels the rest and is raised, unless ``return_exceptions`` puts errors into the
        list. ``progress`` draws a bar on stderr if that is a terminal.
        """
        submits = [prompt_submit(prompt, params, False) for prompt in prompts]
        limit = self._limit(timeout)
        plan = BatchPlan(len(submits), max_in_flight, limit, keep_errors=return_exceptions)
        bar = ProgressBar(len(submits), sys.stderr, progress)
        running: dict[Future[Completion], int] = {}
        try:
            while not plan.done:
                while (work := plan.start(time.monotonic())) is not None:
                    index, left = work
                    with self._channel.call() as key:
                        future = calls.complete(self._channel, key, submits[index], left)
                        running[future] = index
                _wait_some(running, min(plan.wake_in(time.monotonic()), limit + _GRACE))
                for future in [f for f in running if f.done()]:
                    plan.end(running.pop(future), _outcome(future), time.monotonic())
                bar.draw(plan)
        finally:
            for future in running:
                future.cancel()
            bar.draw(plan, last=True)
        return plan.results()

    def close(self) -> None:
        """Cancel what is open and end the I/O thread; calls after it raise ``Cancelled``."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, submit: Submit, timeout: float | None) -> Completion:
        limit = self._limit(timeout)
        with self._channel.call() as key:
            return _result(calls.complete(self._channel, key, submit, limit), limit)

    def _limit(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else check_timeout(timeout)


class Stream:
    """The output of one request as it comes: an iterator over ``Chunk``.

    Closing it, leaving its ``with`` block, an exception while waiting, or forgetting it cancels
    the request. ``completion`` is the whole result, once the iteration has ended.
    """

    def __init__(self, client: Client, submit: Submit, timeout: float) -> None:
        self._client = client
        self._assembler = Assembler()
        self._box: queue.SimpleQueue[Update] = queue.SimpleQueue()
        self._ended = False
        deadline = time.monotonic() + timeout
        channel = client._channel
        self._give_up_at = deadline + _GRACE
        with channel.call() as key:
            self._cancel = weakref.finalize(self, channel.abort, key)
            self._cancel.atexit = False
            channel.start(Open(key, submit, deadline), self._box.put)

    @property
    def completion(self) -> Completion | None:
        """The whole result; None before the end."""
        return self._assembler.completion

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            while not self._ended:
                chunk = self._assembler.feed(self._get())
                self._ended = self._assembler.completion is not None
                if chunk is not None:
                    return chunk
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """Cancel the request unless it has ended; the iteration is over."""
        self._ended = True
        self._cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _get(self) -> Update:
        try:
            return self._box.get(timeout=max(self._give_up_at - time.monotonic(), 0.0))
        except queue.Empty:
            raise Timeout("the client's I/O thread does not answer") from None


def _result(future: Future[T], limit: float) -> T:
    try:
        return future.result(limit + _GRACE)
    except TimeoutError:
        raise Timeout("the client's I/O thread does not answer") from None
    finally:
        future.cancel()


def _wait_some(running: dict[Future[Completion], int], seconds: float) -> None:
    if running:
        wait(running, seconds, FIRST_COMPLETED)
    else:
        time.sleep(seconds)


def _outcome(future: Future[Completion]) -> Outcome:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, DiptychError):
        return error
    raise error
