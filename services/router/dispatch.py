"""Starts and cancels legs: the messages to workers and the table rows that go with them."""

from msgspec import structs

from services.router.counters import Counters
from services.router.effects import Outbox
from services.router.legs import LegTable
from services.router.placement import Local, Need, Pair, need_of
from services.router.records import Leg, OpenRequest, Worker
from shared.ids import TransferId
from shared.messages.request import Request
from shared.messages.router_worker import CancelWork, Expect, KvSource, NewSource, Prefill, Run


class Dispatcher:
    """The only sender of work. Each call leaves tables and messages in agreement."""

    def __init__(self, legs: LegTable, outbox: Outbox, counters: Counters) -> None:
        self.legs = legs
        self._outbox = outbox
        self._counters = counters

    def start(self, request: OpenRequest, placement: Pair | Local, now: float) -> None:
        """Send a placed request to its worker or its pair."""
        self._decide(request, placement.reason, now)
        sent = rest_of(request, now)
        if isinstance(placement, Pair):
            self._start_pair(request, placement, sent, now)
        else:
            self._start_local(request, placement.worker, sent, now)

    def _start_pair(self, request: OpenRequest, pair: Pair, sent: Request, now: float) -> None:
        need = need_of(request, pair.decode)
        prefill = self._open_prefill(request, pair.prefill, sent, need, now)
        decode = self.legs.open(
            request,
            "expect",
            pair.decode,
            sent,
            pending_tokens=0,
            blocks=min(need.decode_blocks, pair.decode.hello.blocks_total),
            now=now,
        )
        decode.source = prefill.dispatch
        request.phase = "prefilling"
        request.decode_worker = pair.decode.hello.worker
        self._send_prefill(prefill, decode)
        self._outbox.worker(
            pair.decode,
            Expect(dispatch=decode.dispatch, request=sent, source=_source(prefill)),
        )

    def _start_local(self, request: OpenRequest, worker: Worker, sent: Request, now: float) -> None:
        need = need_of(request, worker)
        leg = self.legs.open(
            request,
            "run",
            worker,
            sent,
            pending_tokens=need.uncached(worker),
            blocks=min(need.decode_blocks, worker.hello.blocks_total),
            now=now,
        )
        self._run(leg, need)

    def replace_prefill(self, decode: Leg, worker: Worker, now: float) -> None:
        """Let a waiting decode worker pull from another prefill of the very same tokens."""
        request = decode.open
        sent = structs.replace(decode.request, ttl=request.deadline - now)
        need = need_of(request, worker)
        self._decide(request, "split", now)
        prefill = self._open_prefill(request, worker, sent, need, now)
        prefill.replacement, decode.source = True, prefill.dispatch
        request.phase = "prefilling"
        self._send_prefill(prefill, decode)
        self._outbox.worker(
            decode.worker, NewSource(dispatch=decode.dispatch, source=_source(prefill))
        )

    def run_instead(self, decode: Leg, reason: str, now: float) -> None:
        """Let a waiting decode worker compute the prompt itself."""
        request, worker = decode.open, decode.worker
        need = need_of(request, worker)
        self._decide(request, reason, now)
        decode.kind, decode.source, decode.sent_at = "run", None, now
        decode.request = rest_of(request, now)
        self.legs.charge(decode, need.tokens)
        self._run(decode, need)

    def cancel(self, leg: Leg, *, tell: bool = True) -> None:
        """Close a leg; ``tell`` False when the worker knows, or cannot be told now."""
        self.legs.close(leg)
        if tell:
            self._outbox.worker(leg.worker, CancelWork(dispatch=leg.dispatch))

    def cancel_all(self, request: OpenRequest, *, but: Leg | None = None) -> None:
        """Close both legs; the worker of ``but`` needs no word."""
        for leg in (request.prefill, request.decode):
            if leg is not None:
                self.cancel(leg, tell=leg is not but)

    def _decide(self, request: OpenRequest, reason: str, now: float) -> None:
        self._counters.decisions[reason] += 1
        if request.num_output == request.base:
            request.dispatched, request.reason = now, reason
            request.split, request.prefill_worker = False, None

    def _open_prefill(
        self, request: OpenRequest, worker: Worker, sent: Request, need: Need, now: float
    ) -> Leg:
        leg = self.legs.open(
            request,
            "prefill",
            worker,
            sent,
            pending_tokens=need.uncached(worker),
            blocks=min(need.prefill_blocks, worker.hello.blocks_total),
            now=now,
        )
        worker.prefix.add(need.hashes)
        if request.num_output == request.base:
            request.split, request.prefill_worker = True, worker.hello.worker
        return leg

    def _send_prefill(self, prefill: Leg, decode: Leg) -> None:
        self._outbox.worker(
            prefill.worker,
            Prefill(
                dispatch=prefill.dispatch,
                request=prefill.request,
                decode_worker=decode.worker.hello.worker,
            ),
        )

    def _run(self, leg: Leg, need: Need) -> None:
        request, worker = leg.open, leg.worker
        worker.prefix.add(need.hashes)
        request.phase = "running"
        request.decode_worker = worker.hello.worker
        self._outbox.worker(worker, Run(dispatch=leg.dispatch, request=leg.request))


def rest_of(request: OpenRequest, now: float) -> Request:
    """Return what is left of a request: its output so far and its remaining time."""
    return structs.replace(
        request.request, output_ids=request.output_ids(), ttl=request.deadline - now
    )


def _source(prefill: Leg) -> KvSource:
    hello = prefill.worker.hello
    return KvSource(
        transfer=TransferId(prefill.dispatch),
        worker=hello.worker,
        incarnation=hello.incarnation,
        endpoint=hello.kv_endpoint,
    )
