"""A router on real sockets between scripted workers and a scripted gateway."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from services.router.config import RouterConfig
from services.router.service import RouterService
from shared.clock import MonotonicClock
from shared.config import SecuritySection
from shared.ids import (
    DispatchId,
    GatewayId,
    HostId,
    Incarnation,
    RequestId,
    WorkerId,
    new_incarnation,
)
from shared.messages.fleet import Role, WorkerCounters, WorkerLoad
from shared.messages.gateway_router import (
    Ended,
    FleetQuery,
    FleetReply,
    FromGateway,
    GatewayHello,
    GatewayPing,
    Generate,
    RouterPong,
    RouterWelcome,
    ToGateway,
    Tokens,
)
from shared.messages.hello import WIRE_VERSION
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
    RouterBeat,
    Run,
    SequenceFinished,
    SetRole,
    StepOutput,
    TokenOut,
    ToWorker,
    WorkerHello,
    WorkerWelcome,
)
from shared.runtime import host_id
from shared.transport.link import DealerLink
from tests.transport.harness import Context, eventually
from tests.unit.router_fleet_sim import token_of
from tests.unit.router_world import COMPATIBILITY

CONFIG = """
name: router-test
deployment_type: split
workers: {{prefill: {{count: 1}}, decode: {{count: 1}}}}
router: {{worker_timeout: 60s, drain_timeout: 5s}}
runtime_dir: {directory}
"""


class ScriptedWorker:
    """Prefills at once; streams what it decodes, but not beyond ``hold`` tokens of output.

    ``rig.kv`` stands for the KV links: it holds every finished transfer.
    """

    def __init__(self, rig: "Rig", name: str, pid: int = 0) -> None:
        self.name = name
        self.incarnation = new_incarnation()
        self.hold = 10_000
        self.welcomes: list[Incarnation] = []
        self.received: list[ToWorker] = []
        self.tasks: dict[DispatchId, Request] = {}
        self.sources: dict[DispatchId, int] = {}
        self._rig = rig
        self._router: Incarnation | None = None
        self._pid = pid
        self._steps = 0
        self._draining = False
        self._kind: Role = "prefill" if name.startswith("prefill") else "decode"
        self.identity = f"{name}#{self.incarnation}".encode()
        self.link: DealerLink[ToWorker, FromWorker] = DealerLink(
            rig.context, rig.workers, self.identity, ToWorker, self._take
        )
        self.hello()

    def hello(self) -> None:
        self.link.send(
            WorkerHello(
                worker=WorkerId(self.name),
                incarnation=self.incarnation,
                role=self._kind,
                host=host_id() if self._pid else HostId("elsewhere"),
                pid=self._pid,
                kv_endpoint="ipc:///nowhere",
                compatibility=COMPATIBILITY,
                max_model_len=8192,
                blocks_total=1000,
                max_sequences=64,
            )
        )

    def report(self) -> None:
        load = WorkerLoad(running=len(self.tasks), busy=bool(self.tasks))
        self._steps += 1
        self.link.send(Report(step=self._steps, load=load, counters=WorkerCounters()))

    def release(self) -> None:
        """Let everything stream to its end."""
        self.hold = 10_000
        self.pull()

    def pull(self) -> None:
        """Stream everything whose KV is there."""
        for dispatch in list(self.tasks):
            if dispatch not in self.sources or self.sources[dispatch] in self._rig.kv:
                self._stream(dispatch)

    def _take(self, message: ToWorker) -> None:
        self.received.append(message)
        if isinstance(message, WorkerWelcome):
            self.welcomes.append(message.incarnation)
            if message.incarnation != self._router:
                self._router = message.incarnation
                self.tasks.clear()
                self.sources.clear()
        elif isinstance(message, RouterBeat) and message.incarnation != self._router:
            self.hello()
        elif isinstance(message, Prefill):
            self._prefill(message)
        elif isinstance(message, Run | Expect | NewSource):
            if not isinstance(message, NewSource):
                self.tasks[message.dispatch] = message.request
            if isinstance(message, Run):
                self.sources.pop(message.dispatch, None)
            else:
                self.sources[message.dispatch] = message.source.transfer
            self.pull()
        elif isinstance(message, CancelWork):
            self.tasks.pop(message.dispatch, None)
        elif isinstance(message, DrainWorker):
            self._draining = True
        elif isinstance(message, SetRole):
            self._kind, self._draining = message.role, False
        self._empty()

    def _empty(self) -> None:
        if self._draining and not self.tasks:
            self._draining = False
            self.link.send(Drained())

    def _prefill(self, message: Prefill) -> None:
        done = Prefilled(dispatch=message.dispatch, num_cached_tokens=0, times=PhaseTimes())
        index = len(message.request.output_ids)
        token = TokenOut(message.dispatch, index, token_of(message.request.request_id, index))
        self._steps += 1
        self.link.send(StepOutput(step=self._steps, tokens=(token,), prefilled=(done,)))
        self._rig.kv.add(message.dispatch)
        for worker in self._rig.crew:
            if isinstance(worker, ScriptedWorker):
                worker.pull()

    def _stream(self, dispatch: DispatchId) -> None:
        """Send each token in a step of its own; those sent before are sent again."""
        request = self.tasks[dispatch]
        end = request.sampling.max_tokens
        for index in range(len(request.output_ids), min(end, self.hold)):
            token = TokenOut(dispatch, index, token_of(request.request_id, index))
            done = SequenceFinished(
                dispatch=dispatch, reason="length", num_cached_tokens=0, times=PhaseTimes()
            )
            self._steps += 1
            finished = (done,) if index + 1 == end else ()
            self.link.send(StepOutput(step=self._steps, tokens=(token,), finished=finished))
            if finished:
                del self.tasks[dispatch]
                self._empty()


class ScriptedGateway:
    """Keeps the output of its requests and asserts that each token comes once, in order."""

    def __init__(self, context: Context, endpoint: str, name: str = "gateway") -> None:
        self.name = name
        self.incarnation = new_incarnation()
        self.output: dict[RequestId, list[int]] = {}
        self.ended: dict[RequestId, Ended] = {}
        self.welcomes: list[Incarnation] = []
        self.replies: list[FleetReply] = []
        self._router: Incarnation | None = None
        self._requests: dict[RequestId, Request] = {}
        identity = f"{name}#{self.incarnation}".encode()
        self.link: DealerLink[ToGateway, FromGateway] = DealerLink(
            context, endpoint, identity, ToGateway, self._take
        )
        self.hello()

    def hello(self) -> None:
        self.link.send(
            GatewayHello(
                gateway=GatewayId(self.name),
                incarnation=self.incarnation,
                wire_version=WIRE_VERSION,
            )
        )

    def ping(self) -> None:
        self.link.send(GatewayPing())

    def generate(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self.output[request.request_id] = list(request.output_ids)
        self.link.send(Generate(request=request))

    async def status(self) -> FleetReply:
        count = len(self.replies)
        self.link.send(FleetQuery(query=count))
        await eventually(lambda: len(self.replies) > count)
        return self.replies[-1]

    async def end_of(self, name: str) -> Ended:
        await eventually(lambda: name in self.ended)
        return self.ended[RequestId(name)]

    def _take(self, message: ToGateway) -> None:
        if isinstance(message, RouterWelcome):
            again = self._router not in (None, message.incarnation)
            self._router = message.incarnation
            self.welcomes.append(message.incarnation)
            if again:
                self._resubmit()
        elif isinstance(message, RouterPong) and message.incarnation != self._router:
            self.hello()
        elif isinstance(message, Tokens):
            for item in message.items:
                output = self.output[item.request_id]
                assert item.index == len(output), "a token twice, or one too few"
                assert item.token == token_of(item.request_id, item.index)
                output.append(item.token)
        elif isinstance(message, Ended):
            assert message.request_id not in self.ended, "two ends"
            self.ended[message.request_id] = message
        elif isinstance(message, FleetReply):
            self.replies.append(message)

    def _resubmit(self) -> None:
        for request_id, request in self._requests.items():
            if request_id not in self.ended:
                rest = msgspec.structs.replace(request, output_ids=tuple(self.output[request_id]))
                self.link.send(Generate(request=rest))


class Rig:
    """The router's endpoints and everybody around it."""

    def __init__(self, context: Context, directory: Path) -> None:
        self.context = context
        self.gateways = f"ipc://{directory}/router-gateways.sock"
        self.workers = f"ipc://{directory}/router-workers.sock"
        self.crew: list[ScriptedWorker | ScriptedGateway] = []
        self.kv: set[int] = set()

    def worker(self, name: str, pid: int = 0) -> ScriptedWorker:
        worker = ScriptedWorker(self, name, pid)
        self.crew.append(worker)
        return worker

    def gateway(self, name: str = "gateway") -> ScriptedGateway:
        gateway = ScriptedGateway(self.context, self.gateways, name)
        self.crew.append(gateway)
        return gateway

    async def joined(self, *everybody: ScriptedWorker | ScriptedGateway) -> None:
        await eventually(lambda: all(each.welcomes for each in everybody))

    def close(self) -> None:
        for each in self.crew:
            each.link.close()


@asynccontextmanager
async def in_process(
    context: Context, directory: Path, config: RouterConfig
) -> AsyncIterator[tuple[Rig, RouterService]]:
    """Run the service on this loop and drain it at the end."""
    rig = Rig(context, directory)
    service = RouterService(config, new_incarnation(), context, host_id(), MonotonicClock())
    service.bind(rig.gateways, rig.workers, SecuritySection())
    stop = asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    try:
        yield rig, service
    finally:
        stop.set()
        await running
        service.close()
        rig.close()


@asynccontextmanager
async def router_process(directory: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start ``python -m services.router`` and wait until it is ready; killed at the end."""
    config = directory / "deployment.yaml"
    config.write_text(CONFIG.format(directory=directory))
    ready = directory / "router.ready"
    ready.unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.router", "--config", str(config)
    )
    try:
        await eventually(ready.exists)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
