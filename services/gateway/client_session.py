"""One session of an SDK client: its requests, and one ``Delta`` for all of them per tick."""

import asyncio
import logging
from collections.abc import Callable

from diptych import wire
from services.gateway.choice import Choice, Shared
from services.gateway.client_request import ClientRequest, Prepared, prepare, wire_error
from services.gateway.errors import RequestFailed
from services.gateway.front import Front
from shared.errors import DiptychError, ErrorPayload, InvalidRequest
from shared.ids import TenantId

log = logging.getLogger(__name__)


class ClientSession:
    """``send`` returns False once the client cannot be reached: the session is then over.

    ``last_id`` is the highest request id of this client incarnation so far.
    """

    def __init__(
        self,
        front: Front,
        hello: wire.ClientHello,
        tenant: TenantId,
        send: Callable[[wire.ToClient], bool],
        now: float,
    ) -> None:
        self.number = hello.session
        self.heard_at = now
        self.last_id = 0
        self._front = front
        self.tenant = tenant
        self._send = send
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._requests: dict[int, ClientRequest] = {}
        self._changed: dict[int, ClientRequest] = {}
        self._flushing = False

    def submit(self, message: wire.Submit) -> None:
        """Run a request; its id must be higher than all before it."""
        if message.id <= self.last_id:
            error = InvalidRequest(f"request id {message.id} was used before", param="id")
            self._send(wire.Ended(id=message.id, error=wire_error(error.payload())))
            return
        arrival = self._front.clock.now()
        self.last_id = message.id
        task = asyncio.get_running_loop().create_task(self._begin(message, arrival))
        self._tasks[message.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(message.id, None))

    def cancel(self, number: int) -> None:
        """Cancel a request; unknown ids are ignored."""
        task = self._tasks.pop(number, None)
        request = self._requests.pop(number, None)
        if request is not None:
            self._front.broker.abandon(request.choice.request_id)
            self._changed.pop(number, None)
            self._send(request.ended())
        elif task is not None:
            task.cancel()
            self._send(wire.Ended(id=number))

    def close(self) -> None:
        """Cancel everything silently."""
        for task in list(self._tasks.values()):
            task.cancel()
        for request in self._requests.values():
            self._front.broker.abandon(request.choice.request_id)
        self._requests.clear()
        self._changed.clear()

    async def _begin(self, message: wire.Submit, arrival: float) -> None:
        try:
            self._front.broker.require_room(1)
            ready = await prepare(self._front, message)
            self._front.broker.require_room(1)
        except (DiptychError, RequestFailed) as error:
            payload = error.payload() if isinstance(error, DiptychError) else error.payload
            self._send(wire.Ended(id=message.id, error=wire_error(payload)))
        except Exception:
            log.exception("cannot take a submission")
            payload = ErrorPayload(code="internal", message="internal error")
            self._send(wire.Ended(id=message.id, error=wire_error(payload)))
        else:
            self._start(message, ready, arrival)

    def _start(self, message: wire.Submit, ready: Prepared, arrival: float) -> None:
        shared = Shared(
            endpoint="sdk",
            arrival=arrival,
            scored=ready.sampling.logprobs is not None,
            eager=True,
            stopper=self._front.broker,
            metrics=self._front.metrics,
            on_change=self._on_change,
        )
        request = ClientRequest(self._front, message, ready, shared, self.tenant)
        self._send(request.accepted())
        self._requests[message.id] = request
        if request.already is not None:
            request.end_early()
        else:
            request.start()

    def _on_change(self, choice: Choice) -> None:
        request = self._requests.get(choice.index)
        if request is None:
            return
        self._changed[choice.index] = request
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        changed, self._changed = self._changed, {}
        items: list[wire.DeltaItem] = []
        ended: list[ClientRequest] = []
        for request in changed.values():
            scores = request.prompt_scores()
            if scores is not None:
                self._send(scores)
            item = request.delta()
            if item is not None:
                items.append(item)
            if request.choice.end is not None:
                ended.append(request)
        if items:
            self._send(wire.Delta(items=tuple(items)))
        for request in ended:
            if self._requests.pop(request.id, None) is not None:
                self._send(request.ended())
