"""What happens to a request when one of its legs fails."""

from collections.abc import Mapping

from services.router.config import RouterConfig
from services.router.counters import Counters
from services.router.dispatch import Dispatcher
from services.router.effects import Outbox
from services.router.placement import best_prefill, need_of, of_role
from services.router.records import Leg, OpenRequest, Worker
from services.router.requests import Requests
from shared.errors import ErrorCode, ErrorPayload
from shared.ids import DispatchId
from shared.messages.router_worker import TransferLost

FINAL_CODES: tuple[ErrorCode, ...] = ("invalid_request", "too_large", "numerical")
"""Errors of the request itself: no other worker would do better."""

RETRY_FIRST = 0.05
RETRY_LAST = 2.0
"""Seconds between the second and further attempts in a row that bring no token."""


class Recovery:
    """Retries, bounded by ``max_retries`` failures in a row without a token from where it decodes.

    The token that every prefill brings counts for nothing: where hand-overs always fail, a request
    would crawl on by it, one prompt computed for each token.
    """

    def __init__(
        self,
        config: RouterConfig,
        workers: Mapping[bytes, Worker],
        requests: Requests,
        dispatcher: Dispatcher,
        outbox: Outbox,
        counters: Counters,
    ) -> None:
        self._config = config
        self._workers = workers
        self._requests = requests
        self._dispatcher = dispatcher
        self._outbox = outbox
        self._counters = counters

    def leg_failed(
        self, leg: Leg, error: ErrorPayload, now: float, *, tell: bool, at_once: bool = False
    ) -> None:
        """Close a leg and carry its request on elsewhere, or end the request.

        ``tell``: the worker must be told to stop. ``at_once``: the worker is to blame rather
        than the request, so the next attempt need not be held back.
        """
        request = leg.open
        self._dispatcher.cancel(leg, tell=tell)
        if leg.kind != "prefill" and leg.streaming:
            self._renew(request)
        decode = request.decode
        if leg.kind == "prefill" and decode is not None:
            if decode.streaming:
                self._note(request, leg.worker, error, "decode had all it needs already")
            else:
                self._source_failed(decode, leg.worker, error, now, at_once=at_once)
        elif self._may_retry(request, leg.worker, error, now, at_once=at_once):
            self._note(request, leg.worker, error, _elsewhere(request, now))
            self._requests.requeue(request)

    def transfer_lost(self, leg: Leg, message: TransferLost, now: float) -> bool:
        """Decode could not get the KV. False when the message is about an earlier source."""
        if leg.streaming or leg.source != DispatchId(message.transfer):
            return False
        error = message.error
        if not error.retryable and error.code not in FINAL_CODES:
            error = ErrorPayload(code="transfer_failed", message=error.message, retryable=True)
        prefill = leg.open.prefill
        if prefill is not None:
            self._dispatcher.cancel(prefill)
        self._source_failed(leg, None if prefill is None else prefill.worker, error, now)
        return True

    def release(self, leg: Leg) -> None:
        """Close a leg that has done its part."""
        self._dispatcher.cancel(leg, tell=False)

    def worker_failed(self, worker: Worker, error: ErrorPayload, now: float, *, tell: bool) -> None:
        """Move everything off a worker.

        ``tell`` False: it cannot hear now; should it come back it is told then.
        """
        for leg in list(worker.legs.values()):
            if worker.legs.get(leg.dispatch) is not leg:
                continue
            if not tell:
                worker.abandoned.append(leg.dispatch)
            self.leg_failed(leg, error, now, tell=tell, at_once=True)

    def _renew(self, request: OpenRequest) -> None:
        """All attempts are there again once decoding has come further than ever."""
        if request.num_output > request.progress:
            request.strikes = 0
            request.avoid.clear()
            request.progress = request.num_output

    def _source_failed(
        self,
        decode: Leg,
        blamed: Worker | None,
        error: ErrorPayload,
        now: float,
        *,
        at_once: bool = False,
    ) -> None:
        """The prefill a decode worker waits for is gone; both legs were told or closed."""
        request = decode.open
        if not self._may_retry(request, blamed, error, now, at_once=at_once):
            return
        if request.not_before > now:
            then = _elsewhere(request, now)
            self._requests.requeue(request)
        else:
            then = self._replace_prefill(decode, now)
        self._note(request, blamed, error, f"{then} (decode on {decode.worker.hello.worker})")

    def _may_retry(
        self,
        request: OpenRequest,
        blamed: Worker | None,
        error: ErrorPayload,
        now: float,
        *,
        at_once: bool,
    ) -> bool:
        """Count a failed attempt; False when it was the last one and the request has ended."""
        request.strikes += 1
        if not error.retryable or request.strikes > self._config.max_retries:
            self._requests.end(request, error=error)
            tried = f"failed {request.strikes} times in a row (router.max_retries)"
            self._note(request, blamed, error, tried if error.retryable else "failed")
            return False
        request.retries += 1
        self._counters.retries += 1
        if blamed is not None:
            request.avoid.add(blamed.peer)
        if not at_once and request.strikes > 1:
            request.not_before = now + min(RETRY_LAST, RETRY_FIRST * 2 ** (request.strikes - 2))
        return True

    def _replace_prefill(self, decode: Leg, now: float) -> str:
        """Give a waiting decode worker another source; return what was done, for the log.

        Only while it was sent all output there is: a token the client has seen since must be
        part of what decode goes on from, so otherwise the request is placed anew.
        """
        request, worker = decode.open, decode.worker
        usable = worker.health in ("ready", "draining")
        if not usable or len(decode.request.output_ids) != request.num_output:
            self._requests.requeue(request)
            return _elsewhere(request, now)
        prefills = of_role(self._workers.values(), "prefill")
        if prefills:
            chosen = best_prefill(prefills, need_of(request, worker), request.avoid)
            if chosen is not None:
                self._dispatcher.replace_prefill(decode, chosen, now)
                return f"{chosen.hello.worker} computes its prompt anew"
        elif self._config.on_no_prefill == "local":
            self._dispatcher.run_instead(decode, "no_prefill_local", now)
            return "decode computes its prompt itself"
        self._requests.requeue(request)
        return _elsewhere(request, now)

    def _note(
        self, request: OpenRequest, blamed: Worker | None, error: ErrorPayload, then: str
    ) -> None:
        """Log a failed attempt; a client's own mistakes are its business."""
        if error.code in ("invalid_request", "too_large"):
            return
        where = "" if blamed is None else f"{blamed.hello.worker}: "
        text = f"{where}{error.code}: {error.message}; {then}"
        self._outbox.note_request(request.request.request_id, text)


def _elsewhere(request: OpenRequest, now: float) -> str:
    pause = request.not_before - now
    return f"is placed anew in {pause:.2f} s" if pause > 0 else "is placed anew"
