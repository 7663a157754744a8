"""A router state with scripted workers and gateways around it; every step is checked."""

from collections.abc import Sequence
from typing import Any

from services.router.config import RouterConfig
from services.router.effects import Effect, SendGateway, SendWorker
from services.router.events import Event, GatewayMessage, Tick, WorkerMessage
from services.router.state import RouterState
from shared.errors import ErrorCode, ErrorPayload
from shared.ids import (
    DispatchId,
    GatewayId,
    HostId,
    Incarnation,
    RequestId,
    TenantId,
    TransferId,
    WorkerId,
)
from shared.messages.fleet import Role, WorkerCounters, WorkerLoad
from shared.messages.gateway_router import Ended, GatewayHello, Generate, Tokens
from shared.messages.hello import WIRE_VERSION, Compatibility
from shared.messages.request import FinishReason, PhaseTimes, Request, Sampling
from shared.messages.router_worker import (
    CancelWork,
    Expect,
    NewSource,
    Prefill,
    Prefilled,
    Report,
    Run,
    SequenceFailed,
    SequenceFinished,
    StepOutput,
    TokenOut,
    TransferLost,
    WorkerHello,
)

COMPATIBILITY = Compatibility(model="m", kv_dtype="fp32", block_size=16, layout="l")
ROUTER = Incarnation(77)
START = 100.0


def make_request(
    name: str,
    prompt: int | Sequence[int] = 100,
    *,
    max_tokens: int = 8,
    tenant: str = "",
    output: Sequence[int] = (),
    ttl: float = 600.0,
    force_split: bool = False,
) -> Request:
    """A request of ``prompt`` tokens; an int makes a prompt that shares no block with others."""
    if isinstance(prompt, int):
        seed = sum(name.encode()) * 1000 + len(name)
        prompt = [seed + i for i in range(prompt)]
    return Request(
        request_id=RequestId(name),
        tenant=TenantId(tenant),
        prompt_ids=tuple(prompt),
        sampling=Sampling(seed=1, max_tokens=max_tokens),
        output_ids=tuple(output),
        ttl=ttl,
        force_split=force_split,
    )


class World:
    """Drives one ``RouterState``; effects of the last event are in ``effects``."""

    def __init__(self, *, settled: bool = True, **config: Any) -> None:
        self.state = RouterState(RouterConfig(**config), ROUTER, START)
        self.now = START
        self.effects: list[Effect] = []
        self.steps = 0
        self.checked = True
        if settled:
            self.now += 5.5
            self.handle(Tick())

    def handle(self, event: Event) -> list[Effect]:
        self.effects = self.state.handle(event, self.now)
        if self.checked:
            self.state.check()
            assert self.state.wake_at >= self.now or not isinstance(event, Tick)
        return self.effects

    def wait(self, seconds: float, *alive: bytes) -> list[Effect]:
        """Let time pass in ticks; the named workers and all gateways keep talking."""
        collected: list[Effect] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            for gateway in self.state.gateways.by_peer.values():
                gateway.last_heard = self.now
            for peer in alive:
                self.state.fleet.by_peer[peer].last_heard = self.now
            collected += self.handle(Tick())
        self.effects = collected
        return collected

    def gateway(self, name: str = "g", incarnation: int = 1) -> bytes:
        peer = f"{name}#{incarnation}".encode()
        hello = GatewayHello(
            gateway=GatewayId(name),
            incarnation=Incarnation(incarnation),
            wire_version=WIRE_VERSION,
        )
        self.handle(GatewayMessage(peer, hello))
        return peer

    def worker(
        self,
        name: str,
        incarnation: int = 1,
        *,
        role: Role | None = None,
        compatibility: Compatibility = COMPATIBILITY,
        blocks: int = 1000,
        sequences: int = 64,
        vocabulary: int = 0,
    ) -> bytes:
        peer = f"{name}#{incarnation}".encode()
        kind = role or next(r for r in ("prefill", "decode", "mixed") if name.startswith(r))
        hello = WorkerHello(
            worker=WorkerId(name),
            incarnation=Incarnation(incarnation),
            role=kind,  # type: ignore[arg-type]
            host=HostId("h"),
            pid=1234,
            kv_endpoint=f"ipc:///tmp/kv-{name}",
            compatibility=compatibility,
            max_model_len=8192,
            blocks_total=blocks,
            max_sequences=sequences,
            vocab_size=vocabulary,
        )
        self.handle(WorkerMessage(peer, hello))
        return peer

    def generate(self, gateway: bytes, name: str, *args: Any, **kwargs: Any) -> list[Effect]:
        request = make_request(name, *args, **kwargs)
        return self.handle(GatewayMessage(gateway, Generate(request=request)))

    def step(self, peer: bytes, **fields: Any) -> list[Effect]:
        self.steps += 1
        return self.handle(WorkerMessage(peer, StepOutput(step=self.steps, **fields)))

    def tokens(self, peer: bytes, dispatch: DispatchId, first: int, *ids: int) -> list[Effect]:
        out = tuple(TokenOut(dispatch, first + i, token) for i, token in enumerate(ids))
        return self.step(peer, tokens=out)

    def prefilled(
        self, peer: bytes, dispatch: DispatchId, index: int, token: int, cached: int = 0
    ) -> list[Effect]:
        done = Prefilled(dispatch=dispatch, num_cached_tokens=cached, times=PhaseTimes(started=1.0))
        return self.step(peer, tokens=(TokenOut(dispatch, index, token),), prefilled=(done,))

    def finished(
        self,
        peer: bytes,
        dispatch: DispatchId,
        *tokens: TokenOut,
        reason: FinishReason = "length",
        cached: int = 0,
    ) -> list[Effect]:
        """End an output; what ends by its length gets the tokens it lacks."""
        done = SequenceFinished(
            dispatch=dispatch,
            reason=reason,
            num_cached_tokens=cached,
            times=PhaseTimes(finished=2.0),
        )
        if reason == "length":
            tokens += self._rest(peer, dispatch, tokens)
        return self.step(peer, tokens=tokens, finished=(done,))

    def _rest(
        self, peer: bytes, dispatch: DispatchId, tokens: tuple[TokenOut, ...]
    ) -> tuple[TokenOut, ...]:
        leg = self.state.legs.by_id.get(dispatch)
        if leg is None or leg.worker.peer != peer:
            return ()
        first = max([leg.open.num_output, *(t.index + 1 for t in tokens)])
        return tuple(TokenOut(dispatch, i, 5) for i in range(first, leg.open.limit))

    def failed(
        self,
        peer: bytes,
        dispatch: DispatchId,
        code: ErrorCode = "internal",
        *,
        retryable: bool = True,
    ) -> list[Effect]:
        error = ErrorPayload(code=code, message="scripted", retryable=retryable)
        return self.step(peer, failed=(SequenceFailed(dispatch=dispatch, error=error),))

    def lost(self, peer: bytes, dispatch: DispatchId, transfer: int) -> list[Effect]:
        error = ErrorPayload(code="transfer_failed", message="scripted", retryable=True)
        message = TransferLost(dispatch=dispatch, transfer=TransferId(transfer), error=error)
        return self.handle(WorkerMessage(peer, message))

    def report(self, peer: bytes, step: int = 0, *, draining: bool = False, **load: Any) -> None:
        message = Report(
            step=step, load=WorkerLoad(**load), counters=WorkerCounters(), draining=draining
        )
        self.handle(WorkerMessage(peer, message))

    def to(self, peer: bytes, *kinds: type) -> list[Any]:
        """Messages of these kinds in the last effects for this peer; heartbeats only if named."""
        wanted = kinds or (Prefill, Expect, Run, NewSource, CancelWork, Tokens, Ended)
        return [
            effect.message
            for effect in self.effects
            if isinstance(effect, SendWorker | SendGateway)
            and effect.peer == peer
            and isinstance(effect.message, wanted)
        ]

    def one(self, peer: bytes, kind: type) -> Any:
        (message,) = self.to(peer, kind)
        return message

    def health(self, peer: bytes) -> str:
        return self.state.fleet.by_peer[peer].health

    def decisions(self) -> dict[str, int]:
        return dict(self.state.counters.decisions)

    def idle(self) -> None:
        """Everything has ended and nothing is charged to anybody."""
        assert not self.state.requests.open
        assert not self.state.legs.by_id
        for worker in self.state.fleet.by_peer.values():
            assert worker.pending_tokens == worker.committed_blocks == 0


class SplitWorld(World):
    """One gateway, ``prefills`` x ``decodes``, and the pair of one started request."""

    def __init__(self, prefills: int = 1, decodes: int = 1, **config: Any) -> None:
        super().__init__(**config)
        self.gate = self.gateway()
        self.prefills = [self.worker(f"prefill-{i}") for i in range(prefills)]
        self.decodes = [self.worker(f"decode-{i}") for i in range(decodes)]

    def start(self, name: str = "r", *args: Any, **kwargs: Any) -> tuple[Prefill, Expect]:
        """Submit a request that is split between the first prefill and the first decode."""
        self.generate(self.gate, name, *args, **kwargs)
        return self.one(self.prefills[0], Prefill), self.one(self.decodes[0], Expect)
