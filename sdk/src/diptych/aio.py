"""The asyncio client: the blocking client's I/O thread, awaited."""

import asyncio
import sys
import time
import weakref
from asyncio import AbstractEventLoop
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Literal, Self, TypeVar, Unpack, overload

from diptych import calls
from diptych.batch import BatchPlan, Outcome, ProgressBar
from diptych.channel import Channel
from diptych.endpoint import Curve
from diptych.errors import DiptychError, Timeout
from diptych.events import Fleet, Open, Ready, Update
from diptych.params import Messages, Params, Prompt, chat_submit, check_timeout, prompt_submit
from diptych.results import Assembler, Chunk, Completion
from diptych.state import ClientLimits
from diptych.wire import Role, Submit, WorkerOrder

T = TypeVar("T")

_GRACE = 5.0
"""Seconds past a call's deadline after which the I/O thread is taken for dead."""


class AsyncClient:
    """A connection to a Diptych gateway for use from coroutines.

    Like ``Client`` in everything: arguments, errors, reconnecting. Cancelling the awaiting
    task cancels the request. One client may serve several event loops.
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

    async def wait_ready(self, timeout: float = 60.0) -> Ready:
        """Wait until a gateway answers; see ``Client.wait_ready``."""
        limit = check_timeout(timeout)
        with self._channel.call() as key:
            answer = await _result(calls.ask(self._channel, key, "ready", limit), limit)
        assert isinstance(answer, Ready)
        return answer

    async def status(self, timeout: float = 10.0) -> dict[str, object]:
        """Return the fleet's status; see ``Client.status``."""
        return await self._ask_fleet(None, timeout)

    async def drain(
        self, worker: str, *, role: Role | None = None, timeout: float = 10.0
    ) -> dict[str, object]:
        """Empty a worker; see ``Client.drain``."""
        return await self._ask_fleet(WorkerOrder(worker=worker, role=role), timeout)

    async def _ask_fleet(self, order: WorkerOrder | None, timeout: float) -> dict[str, object]:
        limit = check_timeout(timeout)
        with self._channel.call() as key:
            answer = await _result(calls.ask(self._channel, key, "status", limit, order), limit)
        assert isinstance(answer, Fleet)
        return answer.decode()

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        timeline: bool = False,
        **params: Unpack[Params],
    ) -> Completion:
        """Complete a prompt and return the whole output; see ``Client.generate``."""
        return await self._run(prompt_submit(prompt, params, timeline), timeout)

    async def chat(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,
        timeline: bool = False,
        **params: Unpack[Params],
    ) -> Completion:
        """Answer a chat and return the whole output; see ``Client.generate``."""
        return await self._run(chat_submit(messages, params, timeline), timeout)

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        timeline: bool = False,
        **params: Unpack[Params],
    ) -> "AsyncStream":
        """Complete a prompt; iterate with ``async for`` inside a running event loop."""
        return AsyncStream(self, prompt_submit(prompt, params, timeline), self._limit(timeout))

    def chat_stream(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,
        timeline: bool = False,
        **params: Unpack[Params],
    ) -> "AsyncStream":
        """Answer a chat; iterate with ``async for`` inside a running event loop."""
        return AsyncStream(self, chat_submit(messages, params, timeline), self._limit(timeout))

    @overload
    async def generate_batch(
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
    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_in_flight: int = 32,
        progress: bool = True,
        return_exceptions: Literal[True],
        timeout: float | None = None,
        **params: Unpack[Params],
    ) -> list[Outcome]: ...
    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_in_flight: int = 32,
        progress: bool = True,
        return_exceptions: bool = False,
        timeout: float | None = None,
        **params: Unpack[Params],
    ) -> list[Completion] | list[Outcome]:
        """Complete many prompts; see ``Client.generate_batch``."""
        submits = [prompt_submit(prompt, params, False) for prompt in prompts]
        limit = self._limit(timeout)
        plan = BatchPlan(len(submits), max_in_flight, limit, keep_errors=return_exceptions)
        bar = ProgressBar(len(submits), sys.stderr, progress)
        running: dict[asyncio.Future[Completion], int] = {}
        try:
            while not plan.done:
                while (work := plan.start(time.monotonic())) is not None:
                    index, left = work
                    with self._channel.call() as key:
                        future = calls.complete(self._channel, key, submits[index], left)
                        running[asyncio.wrap_future(future)] = index
                await _wait_some(running, min(plan.wake_in(time.monotonic()), limit + _GRACE))
                for task in [f for f in running if f.done()]:
                    plan.end(running.pop(task), _outcome(task), time.monotonic())
                bar.draw(plan)
        finally:
            for task in running:
                task.cancel()
            bar.draw(plan, last=True)
        return plan.results()

    async def aclose(self) -> None:
        """Cancel what is open and end the I/O thread; calls after it raise ``Cancelled``."""
        async with asyncio.timeout(_GRACE * 2):
            await asyncio.to_thread(self._finalizer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _run(self, submit: Submit, timeout: float | None) -> Completion:
        limit = self._limit(timeout)
        with self._channel.call() as key:
            return await _result(calls.complete(self._channel, key, submit, limit), limit)

    def _limit(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else check_timeout(timeout)


class AsyncStream:
    """The output of one request as it comes: an asynchronous iterator over ``Chunk``.

    Closing it, leaving its ``async with`` block, cancelling the task that waits in it, or
    forgetting it cancels the request. ``completion`` is the whole result after the end.
    """

    def __init__(self, client: AsyncClient, submit: Submit, timeout: float) -> None:
        self._client = client
        self._assembler = Assembler()
        self._box: asyncio.Queue[Update] = asyncio.Queue()
        self._ended = False
        deadline = time.monotonic() + timeout
        channel = client._channel
        self._give_up_at = deadline + _GRACE
        sink = _Mailbox(asyncio.get_running_loop(), self._box).put
        with channel.call() as key:
            self._cancel = weakref.finalize(self, channel.abort, key)
            self._cancel.atexit = False
            channel.start(Open(key, submit, deadline), sink)

    @property
    def completion(self) -> Completion | None:
        """The whole result; None before the end."""
        return self._assembler.completion

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        try:
            while not self._ended:
                chunk = self._assembler.feed(await self._get())
                self._ended = self._assembler.completion is not None
                if chunk is not None:
                    return chunk
        except BaseException:
            self.close()
            raise
        raise StopAsyncIteration

    def close(self) -> None:
        """Cancel the request unless it has ended; the iteration is over."""
        self._ended = True
        self._cancel()

    async def aclose(self) -> None:
        """Do what ``close`` does; for ``contextlib.aclosing``."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def _get(self) -> Update:
        if not self._box.empty():
            return self._box.get_nowait()
        try:
            async with asyncio.timeout(max(self._give_up_at - time.monotonic(), 0.0)):
                return await self._box.get()
        except TimeoutError:
            raise Timeout("the client's I/O thread does not answer") from None


class _Mailbox:
    """Carries updates from the I/O thread into a loop; mute once the loop is closed."""

    def __init__(self, loop: AbstractEventLoop, box: asyncio.Queue[Update]) -> None:
        self._loop = loop
        self._box = box

    def put(self, update: Update) -> None:
        if self._loop.is_closed():
            return
        try:
            self._loop.call_soon_threadsafe(self._box.put_nowait, update)
        except RuntimeError:  # closed since the check
            return


async def _result(future: Future[T], limit: float) -> T:
    try:
        async with asyncio.timeout(limit + _GRACE):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise Timeout("the client's I/O thread does not answer") from None


async def _wait_some(running: dict[asyncio.Future[Completion], int], seconds: float) -> None:
    if running:
        await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    else:
        await asyncio.sleep(seconds)


def _outcome(future: asyncio.Future[Completion]) -> Outcome:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, DiptychError):
        return error
    raise error
