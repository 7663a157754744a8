"""Takes what workers produce: tokens, ends of phases, failures. The hot path of the router."""

from services.router.counters import Counters
from services.router.dispatch import Dispatcher
from services.router.effects import Outbox
from services.router.legs import LegTable
from services.router.placement import hashes_of
from services.router.records import Gateway, Leg, OpenRequest, Worker
from services.router.recovery import Recovery
from services.router.requests import Requests
from services.router.scrutiny import (
    UNKNOWN_VOCABULARY,
    finished_fault,
    prefilled_fault,
    token_fault,
    violation,
)
from shared.ids import DispatchId
from shared.messages.gateway_router import PromptLogprobs, TokenItem, Tokens
from shared.messages.request import TokenLogprob
from shared.messages.router_worker import (
    Prefilled,
    SequenceFailed,
    SequenceFinished,
    StepOutput,
    TransferLost,
)

Broken = dict[DispatchId, tuple[Leg, str]]
"""Legs, and what is wrong with their output."""


class Outputs:
    """One ``Tokens`` message per gateway and worker message, then everything that ended."""

    def __init__(
        self,
        legs: LegTable,
        requests: Requests,
        recovery: Recovery,
        dispatcher: Dispatcher,
        outbox: Outbox,
        counters: Counters,
    ) -> None:
        self._by_id = legs.by_id
        self._legs = legs
        self._requests = requests
        self._recovery = recovery
        self._dispatcher = dispatcher
        self._outbox = outbox
        self._counters = counters

    def step(self, worker: Worker, message: StepOutput, now: float) -> None:
        """Take the output of one engine step."""
        broken = self._tokens(worker, message) if message.tokens else None
        for prefilled in message.prefilled:
            if broken is None or prefilled.dispatch not in broken:
                self._prefilled(worker, prefilled, now)
        for leg, fault in (broken or {}).values():
            self._violated(leg, fault, now)
        for finished in message.finished:
            self._finished(worker, finished, now)
        for failed in message.failed:
            self._failed(worker, failed, now)

    def transfer_lost(self, worker: Worker, message: TransferLost, now: float) -> None:
        """Take a decode worker's word that it cannot pull."""
        leg = self._leg(worker, message.dispatch)
        if leg is None:
            return
        if leg.kind != "expect" or not self._recovery.transfer_lost(leg, message, now):
            self._counters.late_messages += 1

    def _tokens(self, worker: Worker, message: StepOutput) -> Broken | None:
        """Pass new tokens on; return the legs whose tokens cannot be believed."""
        by_id, counters = self._by_id, self._counters
        batches: dict[bytes, tuple[Gateway, list[TokenItem]]] = {}
        broken: Broken | None = None
        bound = worker.hello.vocab_size or UNKNOWN_VOCABULARY
        for out in message.tokens:
            leg = by_id.get(out.dispatch)
            if leg is None or leg.worker is not worker:
                counters.late_messages += 1
                counters.violations += leg is not None
                continue
            request = leg.open
            items = request.items
            index = request.base + len(items)
            if broken is not None and leg.dispatch in broken:
                continue
            token, believed = out.token, out.logprob is None
            if not (believed and out.index <= index < request.limit and 0 <= token < bound):
                fault = token_fault(leg, out)
                if fault is not None:
                    broken = broken or {}
                    broken[leg.dispatch] = leg, fault
                    continue
            if not leg.streaming:
                self._first_token(leg)
            if out.index < index:
                continue
            item = TokenItem(request.request.request_id, index, out.token, out.logprob)
            items.append(item)
            gateway = request.gateway
            batch = batches.get(gateway.peer)
            if batch is None:
                batches[gateway.peer] = (gateway, [item])
            else:
                batch[1].append(item)
        for gateway, fresh in batches.values():
            counters.tokens += len(fresh)
            self._outbox.gateway(gateway, Tokens(items=tuple(fresh)))
        return broken

    def _first_token(self, leg: Leg) -> None:
        """A prefill's prompt is computed; a decode's hand-over is done and its source free."""
        leg.streaming = True
        self._legs.charge(leg, 0)
        if leg.kind != "expect":
            return
        request = leg.open
        request.phase = "decoding"
        leg.worker.prefix.add(hashes_of(request))
        prefill = request.prefill
        if prefill is None:
            return
        if prefill.prefilled:
            self._legs.close(prefill)
        elif prefill.replacement:
            # decode had what it needed from the former source after all
            self._dispatcher.cancel(prefill)

    def _prefilled(self, worker: Worker, message: Prefilled, now: float) -> None:
        leg = self._leg(worker, message.dispatch)
        if leg is None:
            return
        if leg.kind != "prefill" or leg.prefilled:
            self._counters.late_messages += 1
            return
        fault = prefilled_fault(leg, message)
        if fault is not None:
            self._violated(leg, fault, now)
            return
        request = leg.open
        leg.prefilled = True
        self._legs.charge(leg, 0)
        self._prompt_facts(request, message)
        if request.prefill_times is None:
            request.prefill_times = message.times
        if request.phase == "decoding":
            self._legs.close(leg)
        else:
            request.phase = "receiving"

    def _finished(self, worker: Worker, message: SequenceFinished, now: float) -> None:
        leg = self._leg(worker, message.dispatch)
        if leg is None:
            return
        fault = finished_fault(leg, message)
        if fault is not None:
            self._violated(leg, fault, now)
            return
        request = leg.open
        self._prompt_facts(request, message)
        if leg.kind == "prefill":
            request.prefill_times = message.times
        else:
            request.decode_times = message.times
        self._requests.end(request, reason=message.reason, by=leg)

    def _failed(self, worker: Worker, message: SequenceFailed, now: float) -> None:
        leg = self._leg(worker, message.dispatch)
        if leg is not None:
            self._recovery.leg_failed(leg, message.error, now, tell=False)

    def _leg(self, worker: Worker, dispatch: DispatchId) -> Leg | None:
        leg = self._by_id.get(dispatch)
        if leg is None or leg.worker is not worker:
            self._counters.late_messages += 1
            self._counters.violations += leg is not None
            return None
        return leg

    def _violated(self, leg: Leg, fault: str, now: float) -> None:
        """Count what cannot be believed and carry the request on elsewhere."""
        self._counters.violations += 1
        if self._by_id.get(leg.dispatch) is leg:
            error = violation(leg, fault)
            self._recovery.leg_failed(leg, error, now, tell=True)

    def _prompt_facts(self, request: OpenRequest, message: Prefilled | SequenceFinished) -> None:
        """Keep what the first attempt says about the prompt: later ones hit their own cache."""
        if request.num_cached_tokens is None:
            prompt = len(request.request.prompt_ids)
            request.num_cached_tokens = max(0, min(message.num_cached_tokens, prompt))
        if message.prompt_logprobs and not request.prompt_logprobs_sent:
            request.prompt_logprobs_sent = True
            self._send_prompt_logprobs(request, message.prompt_logprobs)

    def _send_prompt_logprobs(self, request: OpenRequest, items: tuple[TokenLogprob, ...]) -> None:
        self._outbox.gateway(
            request.gateway,
            PromptLogprobs(request_id=request.request.request_id, items=items),
        )
