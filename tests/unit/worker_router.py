"""A router for ``worker_world``: careless about placement, strict about what workers answer."""

from collections import deque

from shared.errors import ErrorPayload
from shared.ids import DispatchId, Incarnation, RequestId, TransferId, WorkerId
from shared.messages.fleet import WorkerCounters
from shared.messages.request import Request, Sampling
from shared.messages.router_worker import (
    CancelWork,
    Expect,
    FromWorker,
    KvPeer,
    KvSource,
    NewSource,
    Prefill,
    Report,
    RouterBeat,
    Run,
    StepOutput,
    ToWorker,
    TransferLost,
    WorkerHello,
    WorkerWelcome,
)
from shared.worker.events import RouterSaid, Tick
from shared.worker.limits import WorkerLimits
from tests.unit.worker_world import STOP, TENANT, Node, World, undisturbed

ATTEMPTS = 40


class Leg:
    """One dispatch: where it went and what it became."""

    def __init__(self, dispatch: DispatchId, node: Node, open_: "Open", sent: Request) -> None:
        self.dispatch = dispatch
        self.node = node
        self.open = open_
        self.sent = sent
        self.next_index = len(sent.output_ids)
        self.transfer: TransferId | None = None
        self.state = "open"


class Open:
    """One request: what its client got so far."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.got: list[int] = []
        self.state = "open"
        self.attempts = 0
        self.prefill: Leg | None = None
        self.decode: Leg | None = None


class FakeRouter:
    """Drives requests through a world of one or two prefill workers and one decode worker."""

    def __init__(self, tape: list[int], limits: WorkerLimits, blocks: dict[str, int]) -> None:
        self.world = World(tape, self._from_worker)
        self.limits = limits
        self._blocks = blocks
        self._incarnation = 1
        self._last = 0
        self._lives = 0
        self.legs: dict[DispatchId, Leg] = {}
        self.requests: list[Open] = []
        self.mail: dict[bytes, deque[ToWorker]] = {}
        self.counters: dict[WorkerId, WorkerCounters] = {}
        self.lives: dict[bytes, WorkerCounters] = {}
        for name in blocks:
            self.start(name)

    def start(self, name: str) -> None:
        """Start the worker of that name anew."""
        self._lives += 1
        role = "prefill" if name.startswith("prefill") else "decode"
        node = Node(name, role, self._lives, self._blocks[name], self.limits)  # type: ignore[arg-type]
        self.world.add(node)
        self.mail[node.peer] = deque()
        self.world.handle(node, Tick())

    def submit(self, prompt: tuple[int, ...], seed: int, max_tokens: int, ttl: float) -> None:
        """Accept a request."""
        request = Request(
            request_id=RequestId(str(len(self.requests))),
            tenant=TENANT,
            prompt_ids=prompt,
            sampling=Sampling(seed=seed, max_tokens=max_tokens, stop_token_ids=(STOP,)),
            ttl=ttl,
        )
        self.requests.append(Open(request))
        self._place(self.requests[-1])

    def cancel(self, open_: Open) -> None:
        """The client left."""
        if open_.state == "open":
            self._end(open_, "cancelled")

    def kill(self, name: str) -> None:
        """``kill -9`` a worker and start it again at the same address."""
        node = self.world.nodes[WorkerId(name)]
        self.world.kill(node)
        del self.mail[node.peer]
        self.start(name)
        for leg in [x for x in self.legs.values() if x.node is node and x.state == "open"]:
            leg.state = "killed"
            if leg is leg.open.decode and leg.open.state == "open":
                self._retry(leg.open)

    def restart(self) -> None:
        """Lose every dispatch, as a restarted router does; clients re-submit."""
        self._incarnation += 1
        for leg in self.legs.values():
            if leg.state == "open":
                leg.state = "killed"
        for node in self.world.nodes.values():
            self.mail[node.peer].clear()
            self._send(node, WorkerWelcome(incarnation=Incarnation(self._incarnation)))
        for open_ in self.requests:
            open_.prefill = open_.decode = None
            if open_.state == "open":
                self._place(open_)

    def deliver(self, node: Node) -> None:
        """Hand over the next message; it may be delivered twice."""
        messages = self.mail[node.peer]
        message = messages[0] if self.world.choose(30) == 1 else messages.popleft()
        if isinstance(message, CancelWork) and message.dispatch in self.legs:
            self.legs[message.dispatch].state = "told"
        self.world.handle(node, RouterSaid(message))

    def _send(self, node: Node, message: ToWorker) -> None:
        self.mail[node.peer].append(message)

    def _place(self, open_: Open) -> None:
        open_.attempts += 1
        if open_.attempts > ATTEMPTS:
            self._end(open_, "failed")
            return
        sent = self._resumed(open_)
        decode = self._leg(open_, "decode-0", sent)
        open_.decode, open_.prefill = decode, None
        if self.world.choose(4) == 1:
            self._send(decode.node, Run(dispatch=decode.dispatch, request=sent))
            return
        source = self._prefill(open_, decode)
        self._send(decode.node, Expect(dispatch=decode.dispatch, request=sent, source=source))

    def _prefill(self, open_: Open, decode: Leg) -> KvSource:
        """Send the prefill, before or after its ``Expect``, and say where the KV will be."""
        name = f"prefill-{self.world.choose(2)}"
        leg = self._leg(open_, name, decode.sent)
        open_.prefill = leg
        decode.transfer = TransferId(leg.dispatch)
        self._send(
            leg.node,
            Prefill(dispatch=leg.dispatch, request=decode.sent, decode_worker=decode.node.name),
        )
        return KvSource(
            transfer=decode.transfer,
            worker=leg.node.name,
            incarnation=leg.node.key.incarnation,
            endpoint=f"ipc://{name}",
        )

    def _leg(self, open_: Open, name: str, sent: Request) -> Leg:
        self._last += 1
        node = self.world.nodes[WorkerId(name)]
        leg = Leg(DispatchId(self._last), node, open_, sent)
        self.legs[leg.dispatch] = leg
        return leg

    def _resumed(self, open_: Open) -> Request:
        request = open_.request
        return Request(
            request_id=request.request_id,
            tenant=request.tenant,
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            output_ids=tuple(open_.got),
            ttl=request.ttl,
        )

    def _end(self, open_: Open, how: str) -> None:
        open_.state = how
        self._drop(open_.prefill)
        self._drop(open_.decode)

    def _drop(self, leg: Leg | None) -> None:
        if leg is not None and leg.state in ("open", "prefilled"):
            leg.state = "dropped" if leg.state == "open" else leg.state
            if leg.node.peer in self.mail:
                self._send(leg.node, CancelWork(dispatch=leg.dispatch))

    def _retry(self, open_: Open) -> None:
        self._drop(open_.prefill)
        self._drop(open_.decode)
        self._place(open_)

    def _from_worker(self, node: Node, message: FromWorker) -> None:
        match message:
            case WorkerHello():
                self._send(node, WorkerWelcome(incarnation=Incarnation(self._incarnation)))
                self._introduce()
            case StepOutput():
                self._step(node, message)
            case TransferLost():
                self._transfer_lost(message)
            case Report():
                self.counters[node.name] = self.lives[node.peer] = message.counters
            case _:
                pass

    def _introduce(self) -> None:
        """Name the prefill workers of this moment, which may be dead when it is read."""
        nodes = self.world.nodes.values()
        sources = tuple(
            KvPeer(worker=n.name, incarnation=n.key.incarnation, endpoint=f"ipc://{n.name}")
            for n in nodes
            if str(n.name).startswith("prefill")
        )
        beat = RouterBeat(incarnation=Incarnation(self._incarnation), sources=sources)
        for node in nodes:
            if node.peer in self.mail and not str(node.name).startswith("prefill"):
                self._send(node, beat)

    def _leg_of(self, node: Node, dispatch: DispatchId) -> Leg:
        leg = self.legs[dispatch]
        assert leg.node is node, "a worker speaks of another's dispatch"
        assert leg.state in ("open", "dropped", "killed"), f"output of a dispatch {leg.state}"
        return leg

    def _step(self, node: Node, output: StepOutput) -> None:
        for item in output.tokens:
            leg = self._leg_of(node, item.dispatch)
            assert item.index == leg.next_index, "a worker repeats or skips a token"
            leg.next_index += 1
            if leg.state == "open":
                self._token(leg.open, item.index, item.token)
        for ended in output.prefilled:
            leg = self._leg_of(node, ended.dispatch)
            leg.state = "prefilled" if leg.state == "open" else leg.state
        for finished in output.finished:
            leg = self._leg_of(node, finished.dispatch)
            was_open, leg.state = leg.state == "open", "finished"
            if was_open and leg.open.state == "open":
                assert leg.open.got[-1] == STOP or finished.reason == "length"
                self._end(leg.open, "finished")
        for failed in output.failed:
            leg = self._leg_of(node, failed.dispatch)
            was_open, leg.state = leg.state == "open", "failed"
            if was_open and leg.open.state == "open":
                self._failed(leg, failed.error)

    def _failed(self, leg: Leg, error: ErrorPayload) -> None:
        open_ = leg.open
        if not error.retryable:
            self._end(open_, "failed")
        elif leg in (open_.prefill, open_.decode):
            self._retry(open_)

    def _token(self, open_: Open, index: int, token: int) -> None:
        if open_.state != "open":
            return
        assert index <= len(open_.got), "a gap in the stream"
        if index < len(open_.got):
            assert open_.got[index] == token, "a repeated token differs"
        else:
            open_.got.append(token)

    def _transfer_lost(self, message: TransferLost) -> None:
        leg = self.legs[message.dispatch]
        open_ = leg.open
        if leg.state != "open" or leg.transfer != message.transfer or open_.state != "open":
            return
        open_.attempts += 1
        self._drop(open_.prefill)
        open_.prefill = None
        if open_.attempts > ATTEMPTS:
            self._end(open_, "failed")
            return
        fate = self.world.choose(3)
        if fate == 0:
            leg.transfer = None
            leg.sent = self._resumed(open_)
            leg.next_index = len(leg.sent.output_ids)
            self._send(leg.node, Run(dispatch=leg.dispatch, request=leg.sent))
        elif fate == 1:
            source = self._prefill(open_, leg)
            self._send(leg.node, NewSource(dispatch=leg.dispatch, source=source))
        else:
            self._retry(open_)


def check_end(router: FakeRouter) -> None:
    """Nothing is open, nothing leaked, and every stream is what it should be."""
    for open_ in router.requests:
        assert open_.state != "open", f"request {open_.request.request_id} never ended"
        request = open_.request
        right = undisturbed(
            request.prompt_ids,
            request.sampling.seed,
            request.sampling.max_tokens,
            router.limits.windows,
        )
        assert open_.got == right[: len(open_.got)], "a stream differs from the undisturbed one"
        if open_.state == "finished":
            assert open_.got == right, "a finished stream is not complete"
    for node in router.world.nodes.values():
        load = node.state.load()
        assert node.state.idle, f"{node.name} is not idle: {load}"
        assert load.blocks_free + load.blocks_cached == load.blocks_total, load
