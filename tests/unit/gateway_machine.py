"""A gateway state machine with one router, and readers of its effects."""

from services.gateway.events import Effect, Finished, FromRouter, NewTokens, Send, Submit
from services.gateway.state import GatewayState
from shared.ids import GatewayId, Incarnation, RequestId, TenantId
from shared.messages.gateway_router import (
    CancelRequest,
    Generate,
    RouterWelcome,
    ToGateway,
    TokenItem,
    Tokens,
)
from shared.messages.request import Request, Sampling

FIRST, SECOND = Incarnation(11), Incarnation(22)
RID = RequestId("r")


def make(max_open: int = 4, welcomed: bool = True) -> GatewayState:
    state = GatewayState(
        GatewayId("gateway"),
        Incarnation(1),
        max_open=max_open,
        silence=5.0,
        max_model_len=100,
        now=0.0,
    )
    if welcomed:
        state.handle(FromRouter(RouterWelcome(incarnation=FIRST)), 0.0)
    return state


def submit(name: str = "r", max_tokens: int = 8, deadline: float = 100.0) -> Submit:
    sampling = Sampling(seed=1, max_tokens=max_tokens, stop_token_ids=(2,), prompt_logprobs=0)
    request = Request(
        request_id=RequestId(name),
        tenant=TenantId(""),
        prompt_ids=(5, 6, 7),
        sampling=sampling,
        ttl=deadline,
    )
    return Submit(request, deadline)


def generated(effects: list[Effect]) -> list[Request]:
    sent = [e.message for e in effects if isinstance(e, Send)]
    return [message.request for message in sent if isinstance(message, Generate)]


def cancelled(effects: list[Effect]) -> list[str]:
    sent = [e.message for e in effects if isinstance(e, Send)]
    return [message.request_id for message in sent if isinstance(message, CancelRequest)]


def finished(effects: list[Effect]) -> list[Finished]:
    return [effect for effect in effects if isinstance(effect, Finished)]


def received(effects: list[Effect]) -> list[int]:
    return [i.token for e in effects if isinstance(e, NewTokens) for i in e.items]


def tokens(wire: RequestId, *indices: int) -> FromRouter:
    return FromRouter(Tokens(items=tuple(TokenItem(wire, i, 10 + i) for i in indices)))


def say(state: GatewayState, message: ToGateway, now: float = 1.0) -> list[Effect]:
    effects = state.handle(FromRouter(message), now)
    state.check()
    return effects


def started(state: GatewayState, event: Submit | None = None) -> RequestId:
    (request,) = generated(state.handle(event or submit(), 1.0))
    return request.request_id
