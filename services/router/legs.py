"""The table of dispatches and the load accounting that follows from it."""

from services.router.records import Leg, LegKind, OpenRequest, Worker
from shared.ids import DispatchId, Incarnation
from shared.messages.request import Request


class LegTable:
    """Every dispatch in flight. Opening and closing legs is all that changes workers' load.

    Dispatch ids start at a number derived from the router's incarnation: a worker that still
    holds work of an earlier router cannot take one of its transfers for a new one. ``closed``
    counts the legs closed so far.
    """

    def __init__(self, incarnation: Incarnation) -> None:
        self.by_id: dict[DispatchId, Leg] = {}
        self._last = (incarnation & 0x7FFF_FFFF) << 32
        self.closed = 0
        self._clock = 0

    def open(
        self,
        request: OpenRequest,
        kind: LegKind,
        worker: Worker,
        sent: Request,
        *,
        pending_tokens: int,
        blocks: int,
        now: float,
    ) -> Leg:
        """Enter a new dispatch and charge it to its worker."""
        self._last += 1
        leg = Leg(
            dispatch=DispatchId(self._last),
            kind=kind,
            worker=worker,
            open=request,
            request=sent,
            sent_at=now,
            pending_tokens=pending_tokens,
            blocks=blocks,
        )
        self.by_id[leg.dispatch] = worker.legs[leg.dispatch] = leg
        worker.pending_tokens += pending_tokens
        worker.committed_blocks += blocks
        self._clock += 1
        worker.last_used = self._clock
        if kind == "prefill":
            request.prefill = leg
        else:
            request.decode = leg
        return leg

    def close(self, leg: Leg) -> None:
        """Take a dispatch out; whatever still arrives for it is late."""
        self.closed += 1
        del self.by_id[leg.dispatch]
        worker = leg.worker
        del worker.legs[leg.dispatch]
        worker.pending_tokens -= leg.pending_tokens
        worker.committed_blocks -= leg.blocks
        if leg.open.prefill is leg:
            leg.open.prefill = None
        else:
            leg.open.decode = None

    def charge(self, leg: Leg, pending_tokens: int) -> None:
        """The prompt tokens this leg still has to compute changed."""
        leg.worker.pending_tokens += pending_tokens - leg.pending_tokens
        leg.pending_tokens = pending_tokens

    def grow(self, leg: Leg, blocks: int) -> None:
        """The leg holds more blocks than was predicted."""
        if blocks > leg.blocks:
            leg.worker.committed_blocks += blocks - leg.blocks
            leg.blocks = blocks

    def check(self) -> None:
        """Raise ``AssertionError`` unless every table agrees with every other."""
        for dispatch, leg in self.by_id.items():
            assert leg.dispatch == dispatch
            assert leg.worker.legs.get(dispatch) is leg
            assert leg is (leg.open.prefill if leg.kind == "prefill" else leg.open.decode)
            assert leg.open.phase not in ("queued", "ended")
