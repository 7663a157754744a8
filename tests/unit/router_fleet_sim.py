"""A scripted fleet for random tests of the router: workers that compute a known function.

Token ``i`` of a request is ``token_of(request, i)``, whoever computes it. Messages wait in one
line per direction and worker until the test delivers them.
"""

from collections import deque
from typing import Any

from services.router.effects import Effect, SendGateway, SendWorker
from services.router.events import (
    GatewayMessage,
    Tick,
    WorkerExited,
    WorkerMessage,
)
from shared.errors import ErrorPayload
from shared.ids import DispatchId, RequestId, TransferId
from shared.messages.fleet import Role, WorkerCounters, WorkerLoad
from shared.messages.gateway_router import CancelRequest, Ended, Tokens
from shared.messages.request import PhaseTimes, Request
from shared.messages.router_worker import (
    CancelWork,
    Drained,
    DrainWorker,
    Expect,
    FromWorker,
    NewSource,
    Prefill,
    Prefilled,
    Report,
    Run,
    SequenceFailed,
    SequenceFinished,
    SetRole,
    StepOutput,
    TokenOut,
    ToWorker,
    TransferLost,
)
from tests.unit.router_world import World

VOCABULARY = 1000


def token_of(request_id: RequestId, index: int) -> int:
    return (sum(request_id.encode()) * 31 + index * 7) % VOCABULARY


class Task:
    """One dispatch inside a scripted worker."""

    def __init__(self, request: Request, source: TransferId | None = None) -> None:
        self.request = request
        self.source = source
        self.index = len(request.output_ids)
        self.held = False

    def token(self, dispatch: DispatchId) -> TokenOut:
        out = TokenOut(dispatch, self.index, token_of(self.request.request_id, self.index))
        self.index += 1
        return out

    @property
    def complete(self) -> bool:
        return self.index >= self.request.sampling.max_tokens


class SimWorker:
    """Takes and produces messages; ``kv`` names the holder of each finished transfer."""

    def __init__(self, peer: bytes, role: Role, kv: "dict[int, SimWorker]") -> None:
        self.peer = peer
        self.role = role
        self.inbox: deque[ToWorker] = deque()
        self.outbox: deque[FromWorker] = deque()
        self.tasks: dict[DispatchId, Task] = {}
        self.step = 0
        self.hung = False
        self.draining = False
        self._kv = kv

    def take(self) -> None:
        if not self.inbox:
            return
        message = self.inbox.popleft()
        if isinstance(message, Prefill | Run):
            self.tasks[message.dispatch] = Task(message.request)
        elif isinstance(message, Expect):
            self.tasks[message.dispatch] = Task(message.request, message.source.transfer)
        elif isinstance(message, NewSource):
            task = self.tasks.get(message.dispatch)
            if task is not None and task.source is not None:
                task.source = message.source.transfer
        elif isinstance(message, CancelWork):
            self.tasks.pop(message.dispatch, None)
            self._kv.pop(message.dispatch, None)
        elif isinstance(message, DrainWorker):
            self.draining = True
        elif isinstance(message, SetRole):
            self.role, self.draining = message.role, False
        if self.draining and not self.tasks:
            self.outbox.append(Drained())

    def work(self, pick: int) -> None:
        """Advance one task by a step."""
        if self.hung or not self.tasks:
            return
        dispatch, task = list(self.tasks.items())[pick % len(self.tasks)]
        if task.held or (task.source is not None and task.source not in self._kv):
            return
        self.step += 1
        out = [task.token(dispatch)]
        if task.source is not None:
            self._kv.pop(task.source).tasks.pop(DispatchId(task.source), None)
            task.source = None
            if not task.complete:
                out.append(task.token(dispatch))
        done: dict[str, Any] = {}
        if task.complete:
            finished = SequenceFinished(
                dispatch=dispatch, reason="length", num_cached_tokens=0, times=PhaseTimes()
            )
            done["finished"] = (finished,)
            del self.tasks[dispatch]
        elif self.role == "prefill":
            self._kv[dispatch] = self
            task.held = True
            prefilled = Prefilled(dispatch=dispatch, num_cached_tokens=0, times=PhaseTimes())
            done["prefilled"] = (prefilled,)
        self.outbox.append(StepOutput(step=self.step, tokens=tuple(out), **done))

    def fail(self, pick: int, *, retryable: bool) -> None:
        if not self.tasks:
            return
        dispatch, task = list(self.tasks.items())[pick % len(self.tasks)]
        error = ErrorPayload(code="internal", message="scripted", retryable=retryable)
        if task.source is not None and retryable:
            self.outbox.append(TransferLost(dispatch=dispatch, transfer=task.source, error=error))
            return
        del self.tasks[dispatch]
        failed = SequenceFailed(dispatch=dispatch, error=error)
        self.outbox.append(StepOutput(step=self.step, failed=(failed,)))

    def report(self) -> None:
        busy = any(not task.held for task in self.tasks.values())
        self.outbox.append(
            Report(
                step=self.step,
                load=WorkerLoad(running=len(self.tasks), busy=busy),
                counters=WorkerCounters(),
            )
        )


class FleetSim:
    """Routes effects to scripted workers and checks what reaches the gateway."""

    def __init__(self, **config: Any) -> None:
        self.world = World(settled=False, **config)
        self.kv: dict[int, SimWorker] = {}
        self.workers: dict[str, SimWorker] = {}
        self.incarnations: dict[str, int] = {}
        self.gateway_incarnation = 0
        self.received: dict[RequestId, list[int]] = {}
        self.bases: dict[RequestId, int] = {}
        self.ended: dict[RequestId, Ended] = {}
        self.restart_gateway()

    def restart_gateway(self) -> None:
        self.gateway_incarnation += 1
        self.gate = self.world.gateway("g", self.gateway_incarnation)
        self.absorb(self.world.effects)

    def join(self, name: str) -> None:
        """Start or restart a worker under this name."""
        incarnation = self.incarnations[name] = self.incarnations.get(name, 0) + 1
        role: Any = name.split("-")[0]
        worker = SimWorker(f"{name}#{incarnation}".encode(), role, self.kv)
        self.workers[name] = worker
        self.world.worker(name, incarnation, blocks=200, sequences=4, vocabulary=VOCABULARY)
        self.absorb(self.world.effects)

    def kill(self, name: str, *, noticed: bool) -> None:
        """End a worker; whatever it had not sent is gone."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        for dispatch in worker.tasks:
            self.kv.pop(dispatch, None)
        if noticed:
            self.absorb(self.world.handle(WorkerExited(worker.peer)))

    def generate(self, name: str, length: int, max_tokens: int, resumed: int) -> None:
        request_id = RequestId(name)
        if request_id in self.received:
            return
        if self.gate not in self.world.state.gateways.by_peer:
            self.world.gateway("g", self.gateway_incarnation)
        resumed = min(resumed, max_tokens)
        self.received[request_id] = []
        self.bases[request_id] = resumed
        self.world.generate(
            self.gate,
            name,
            length,
            max_tokens=max_tokens,
            output=[token_of(request_id, i) for i in range(resumed)],
            ttl=60.0,
        )
        self.absorb(self.world.effects)

    def cancel(self, name: str) -> None:
        message = CancelRequest(request_id=RequestId(name))
        self.absorb(self.world.handle(GatewayMessage(self.gate, message)))

    def deliver(self, worker: SimWorker, *, keep: bool = False) -> None:
        """Hand the worker's oldest message to the router; ``keep`` delivers it again later."""
        if worker.outbox:
            message = worker.outbox[0] if keep else worker.outbox.popleft()
            self.absorb(self.world.handle(WorkerMessage(worker.peer, message)))

    def wait(self, seconds: float, *, silent: bool = False) -> None:
        """Let time pass; ``silent``: without a sign of life from the gateway."""
        self.world.now += seconds
        for gateway in self.world.state.gateways.by_peer.values():
            if not silent:
                gateway.last_heard = self.world.now
        self.absorb(self.world.handle(Tick()))

    def absorb(self, effects: list[Effect]) -> None:
        """Queue what goes to workers; check what goes to the gateway."""
        by_peer = {worker.peer: worker for worker in self.workers.values()}
        for effect in effects:
            if isinstance(effect, SendWorker) and effect.peer in by_peer:
                by_peer[effect.peer].inbox.append(effect.message)
            elif isinstance(effect, SendGateway):
                self._to_gateway(effect.message)

    def _to_gateway(self, message: object) -> None:
        if isinstance(message, Tokens):
            for item in message.items:
                assert item.request_id not in self.ended, "a token after the end"
                received = self.received[item.request_id]
                assert item.index == self.bases[item.request_id] + len(received)
                assert item.token == token_of(item.request_id, item.index)
                received.append(item.token)
        elif isinstance(message, Ended):
            assert message.request_id not in self.ended, "two ends"
            self.ended[message.request_id] = message
            total = self.bases[message.request_id] + len(self.received[message.request_id])
            assert message.num_tokens == total

    def settle(self, names: list[str]) -> None:
        """Let a healthy fleet work until everything has ended."""
        for name in names:
            if name not in self.workers:
                self.join(name)
        for round_number in range(400):
            for worker in self.workers.values():
                worker.hung = False
                while worker.inbox:
                    worker.take()
                for pick in range(len(worker.tasks)):
                    worker.work(pick)
                worker.report()
                while worker.outbox:
                    self.deliver(worker)
            self.wait(0.4)
            if not self.world.state.requests.open and round_number > 2:
                break
        self.world.idle()
        assert set(self.ended) == set(self.received)
        for worker in self.workers.values():
            while worker.inbox:
                worker.take()
            assert not worker.tasks, "a dispatch outlived its request"
