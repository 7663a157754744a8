"""Open requests from acceptance to their one ``Ended``."""

from collections.abc import Callable, Iterable
from functools import partial

from services.router.admission import AdmissionQueue
from services.router.config import RouterConfig
from services.router.counters import Counters
from services.router.dispatch import Dispatcher
from services.router.effects import Outbox
from services.router.placement import (
    Local,
    Pair,
    Placement,
    Refuse,
    Wait,
    can_decode,
    hashes_of,
    place,
)
from services.router.records import Gateway, Leg, OpenRequest, Worker
from shared.errors import DeadlineExceeded, ErrorPayload, InvalidRequest, NoWorker, Overloaded
from shared.ids import RequestId
from shared.messages.gateway_router import Ended, RequestTimeline
from shared.messages.request import FinishReason, Request

MAX_OPEN = 16_384
"""Requests open at once, over all gateways."""

MAX_BYTES = 7 << 20
"""What a request may take in a frame of 8 MiB; larger ones no worker could be sent."""

NO_WORKER_RETRY = 5.0
"""Seconds after which to try again where there was no worker for long."""

SETTLE_TIME = 2.0
"""Seconds after start in which prefill workers may still be saying hello."""

RESUBMIT_TIME = 5.0
RESUBMIT_FACTOR = 4
"""How far, and how long after start, the queue's bounds stretch: gateways then bring back what
was admitted before."""


class Requests:
    """The table of open requests, the queue in front of it, and its end.

    Before ``due`` no request runs out of time and none may be placed by time alone.
    """

    def __init__(
        self,
        config: RouterConfig,
        dispatcher: Dispatcher,
        outbox: Outbox,
        counters: Counters,
        started: float,
    ) -> None:
        self.open: dict[RequestId, OpenRequest] = {}
        self.queue = AdmissionQueue(config.max_queue, config.max_queued_tokens)
        self.draining = False
        self._config = config
        self._dispatcher = dispatcher
        self._outbox = outbox
        self._counters = counters
        self._started = started
        self._next_end = self._next_start = float("inf")
        self._absent_since: float | None = started

    @property
    def due(self) -> float:
        return min(self._next_end, self._next_start)

    def settled(self, now: float) -> bool:
        """Whether the fleet had the time to introduce itself to this router."""
        return now - self._started >= SETTLE_TIME

    def accept(self, gateway: Gateway, request: Request, now: float) -> None:
        """Take a request in, or answer at once why not."""
        twin = self.open.get(request.request_id)
        if twin is not None:
            self._counters.duplicates += 1
            # the one Ended of an id belongs to the request that has it
            if twin.gateway is not gateway:
                error = InvalidRequest(
                    f"request id {request.request_id!r} is already open", param="request_id"
                )
                self._outbox.gateway(
                    gateway, Ended(request_id=request.request_id, error=error.payload())
                )
            return
        error_payload = self._objection(request, now)
        if error_payload is not None:
            self._counters.rejected += 1
            self._outbox.gateway(gateway, Ended(request_id=request.request_id, error=error_payload))
            return
        opened = OpenRequest(
            request=request,
            gateway=gateway,
            received=now,
            deadline=now + request.ttl,
            base=len(request.output_ids),
            limit=request.sampling.max_tokens,
            progress=len(request.output_ids),
        )
        self.open[request.request_id] = gateway.requests[request.request_id] = opened
        self._next_end = min(self._next_end, opened.deadline)
        self._counters.accepted += 1
        reason = whole(opened) if request.output_ids else None
        if reason is not None:
            self.end(opened, reason=reason)
        elif request.output_ids:
            self.queue.resume(opened)
        else:
            self.queue.push(opened)

    def end(
        self,
        request: OpenRequest,
        *,
        reason: FinishReason | None = None,
        error: ErrorPayload | None = None,
        by: Leg | None = None,
    ) -> None:
        """Send the one terminal message; ``by`` is the leg that ended by itself."""
        if request.phase == "queued":
            self.queue.remove(request)
        if by is not None and by.kind != "prefill":
            by.worker.prefix.add(hashes_of(request))
        self._dispatcher.cancel_all(request, but=by)
        request.phase = "ended"
        request_id = request.request.request_id
        del self.open[request_id]
        del request.gateway.requests[request_id]
        if error is not None:
            self._counters.failed += 1
        elif reason is not None:
            self._counters.finished += 1
        else:
            self._counters.cancelled += 1
        self._outbox.gateway(
            request.gateway,
            Ended(
                request_id=request_id,
                reason=reason,
                error=error,
                num_tokens=request.num_output,
                num_cached_tokens=request.num_cached_tokens or 0,
                timeline=_timeline(request),
            ),
        )

    def requeue(self, request: OpenRequest) -> None:
        """Give up both legs and place the rest anew, ahead of everybody."""
        self._dispatcher.cancel_all(request)
        reason = whole(request)
        if reason is not None:
            self.end(request, reason=reason)
        else:
            self.queue.resume(request)

    def place_all(self, workers: Iterable[Worker], now: float) -> None:
        """Start whatever there is room for."""
        self._next_start = float("inf")
        if any(can_decode(worker, self._config) for worker in workers):
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = now
        if not len(self.queue):
            return
        choose = partial(self._choose, list(workers), now)
        self.queue.drain(choose, partial(self._start, now), now)
        self._next_start = self.queue.held_until(now)
        if self._absent_since is not None:
            self._next_start = min(self._next_start, self._despair(self._absent_since, now))
        if len(self.queue) and not self.settled(now):
            self._next_start = min(self._next_start, self._started + SETTLE_TIME)

    def _despair(self, absent_since: float, now: float) -> float:
        """End what never brought output and nobody could run for too long; return the next end.

        Streams under way wait on, for as long as they may run at all.
        """
        patience, due = self._config.no_worker_timeout, float("inf")
        for request in self.queue.waiting():
            end = max(absent_since, request.received) + patience
            if request.num_output:
                continue
            if end > now:
                due = min(due, end)
                continue
            error = NoWorker(
                f"no worker that could decode has been ready for {patience:g} s "
                "(router.no_worker_timeout)",
                retry_after=NO_WORKER_RETRY,
            )
            self.end(request, error=error.payload())
        return due

    def expire(self, now: float) -> None:
        """End what has run out of time, queued or running."""
        if now < self._next_end:
            return
        for request in [r for r in self.open.values() if r.deadline <= now]:
            where = "in the queue" if request.phase == "queued" else "while running"
            error = DeadlineExceeded(
                f"the request's time of {request.request.ttl:g} s ended {where}"
            )
            self.end(request, error=error.payload())
        self._next_end = min((r.deadline for r in self.open.values()), default=float("inf"))

    def fail_all(self, error: Callable[[], ErrorPayload]) -> None:
        """End everything that is still open."""
        for request in list(self.open.values()):
            self.end(request, error=error())

    def check(self) -> None:
        """Raise ``AssertionError`` unless each request is where its phase says."""
        self.queue.check()
        assert len(self.open) <= MAX_OPEN
        queued = 0
        for request_id, request in self.open.items():
            assert request.request.request_id == request_id
            assert request.gateway.requests.get(request_id) is request
            assert self._next_end <= request.deadline
            kinds = (
                None if request.prefill is None else request.prefill.kind,
                None if request.decode is None else request.decode.kind,
            )
            queued += request.phase == "queued"
            allowed: dict[str, tuple[tuple[str | None, str | None], ...]] = {
                "queued": ((None, None),),
                "prefilling": (("prefill", "expect"),),
                "receiving": (("prefill", "expect"), (None, "expect")),
                "decoding": ((None, "expect"), ("prefill", "expect")),
                "running": ((None, "run"),),
            }
            assert kinds in allowed[request.phase], (request.phase, kinds)
        assert queued == len(self.queue)

    def _objection(self, request: Request, now: float) -> ErrorPayload | None:
        ids = request.prompt_ids + request.output_ids
        if not request.prompt_ids:
            return InvalidRequest("the prompt is empty", param="prompt").payload()
        if min(ids) < 0 or max(ids) >> 32:
            return InvalidRequest("a token id is out of range", param="prompt").payload()
        if not request.ttl > 0:
            return DeadlineExceeded("the request's time was up on arrival").payload()
        grammar = request.sampling.grammar
        schema = 0 if grammar is None else len(grammar.schema.encode())
        if 5 * len(ids) + schema + 14 * len(request.sampling.logit_bias) > MAX_BYTES:
            return InvalidRequest(
                "the request is too large to be sent on", param="prompt"
            ).payload()
        if self.draining:
            return Overloaded(
                "the router is shutting down", retry_after=self._config.drain_timeout
            ).payload()
        if len(self.open) >= MAX_OPEN:
            return self._overloaded(now)
        factor = 1 if now - self._started >= RESUBMIT_TIME else RESUBMIT_FACTOR
        if not request.output_ids and self.queue.is_full(len(ids), factor):
            longest = self.queue.displace(request.tenant)
            if longest is None:
                return self._overloaded(now)
            self.end(longest, error=self._overloaded(now))
        return None

    def _overloaded(self, now: float) -> ErrorPayload:
        return Overloaded(
            f"{self.queue.num_requests} requests with {self.queue.num_tokens} tokens wait "
            "(router.max_queue, router.max_queued_tokens)",
            retry_after=self.queue.retry_after(now),
        ).payload()

    def _choose(self, workers: list[Worker], now: float, request: OpenRequest) -> Placement:
        placement = place(request, workers, self._config, settled=self.settled(now))
        if isinstance(placement, Wait) and placement.reason == "no_prefill_wait":
            if not request.waited_for_prefill:
                self._counters.decisions[placement.reason] += 1
            request.waited_for_prefill = True
        return placement

    def _start(self, now: float, request: OpenRequest, placement: Pair | Local | Refuse) -> None:
        if isinstance(placement, Refuse):
            self._counters.decisions[placement.reason] += 1
            request.reason = placement.reason
            self.end(request, error=placement.error)
        else:
            self._dispatcher.start(request, placement, now)


def whole(request: OpenRequest) -> FinishReason | None:
    """Say how the output ended if nothing is left to compute."""
    sampling = request.request.sampling
    if request.num_output >= sampling.max_tokens:
        return "length"
    last = request.output_ids()[-1:]
    return "stop" if last and last[0] in sampling.stop_token_ids else None


def shutting_down() -> ErrorPayload:
    """The error of what a drain could not finish."""
    return NoWorker(
        "the router shut down before the request was finished", retry_after=1.0
    ).payload()


def _timeline(request: OpenRequest) -> RequestTimeline:
    return RequestTimeline(
        received=request.received,
        dispatched=request.dispatched,
        split=request.split,
        reason=request.reason,
        retries=request.retries,
        prefill_worker=request.prefill_worker,
        decode_worker=request.decode_worker,
        prefill=request.prefill_times,
        decode=request.decode_times,
    )
