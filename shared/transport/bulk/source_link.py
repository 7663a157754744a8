"""A reader's sockets towards one source of KV, and what waits to be sent on each."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import zmq
from msgspec import Struct

from shared.kv.layout import KvLayout
from shared.messages.fleet import CodecRule
from shared.transport.bulk.rates import PairRates
from shared.transport.endpoint import connect
from shared.transport.hopeless import WriteWatch
from shared.transport.pump import LinkLimits
from shared.transport.security import CurveClient

log = logging.getLogger(__name__)

Context = zmq.Context[zmq.Socket[bytes]]

_LIMITS: Final = LinkLimits(hwm=1024)
_NOBLOCK = int(zmq.NOBLOCK)


class Peer(Struct, frozen=True, kw_only=True):
    """How to reach a source: its bulk endpoint, the pool it must have, who we are to it.

    ``codec`` is what both sides allow for its KV, ``layout`` the pool's, None as ours.
    """

    endpoint: str
    arena: int
    identity: bytes
    codec: CodecRule = "none"
    layout: KvLayout | None = None
    security: CurveClient | None = None


class Lane:
    """One DEALER, polled by ``poller`` as long as it is open.

    ``nonce`` belongs to its self-test, which sets ``tested``.
    """

    def __init__(
        self, context: Context, poller: zmq.Poller, peer: Peer, identity: bytes, nonce: int
    ) -> None:
        self.nonce = nonce
        self.tested = False
        self.outbox: deque[bytes] = deque()
        self._peer = peer
        self._identity = identity
        self._context = context
        self._poller = poller
        self._watch = WriteWatch()
        self.socket = self._connect()

    def flush(self) -> None:
        """Send what waits as far as the socket takes it; one that is hopeless is opened anew."""
        while self.outbox:
            try:
                self.socket.send(self.outbox[0], _NOBLOCK)
            except zmq.Again:
                if self._watch.hopeless(time.monotonic()):
                    self._reopen()
                return
            self._watch.wrote()
            self.outbox.popleft()

    def close(self) -> None:
        """Close the socket at once."""
        self._poller.unregister(self.socket)
        self.socket.close(linger=0)

    def _reopen(self) -> None:
        log.warning("nothing could be sent to %s for a while; connecting anew", self._peer.endpoint)
        self.close()
        self.socket = self._connect()

    def _connect(self) -> "zmq.Socket[bytes]":
        peer = self._peer
        socket = connect(self._context, peer.endpoint, self._identity, _LIMITS, peer.security)
        self._poller.register(socket, zmq.POLLIN)
        return socket


class SourceLink:
    """All sockets towards one source, one per nonce; the self-test has to pass over each.

    Raises:
        BadConfig: the endpoint makes no sense.
    """

    def __init__(
        self,
        context: Context,
        poller: zmq.Poller,
        peer: Peer,
        rates: PairRates,
        *,
        nonces: Sequence[int],
        deadline: float,
    ) -> None:
        self.peer = peer
        self.rates = rates
        self.deadline = deadline
        self.lanes: list[Lane] = []
        try:
            for number, nonce in enumerate(nonces):
                # The source knows a reader by its routing id: each socket is a reader to it.
                identity = peer.identity + (b"/%d" % number if number else b"")
                self.lanes.append(Lane(context, poller, peer, identity, nonce))
        except BaseException:
            self.close()
            raise

    @property
    def tested(self) -> bool:
        """True once the self-test has passed."""
        return all(lane.tested for lane in self.lanes)

    @property
    def waiting(self) -> bool:
        """True while something could not be sent yet."""
        return any(lane.outbox for lane in self.lanes)

    def flush(self) -> None:
        """Send what waits on any socket, as far as they take it."""
        for lane in self.lanes:
            lane.flush()

    def close(self) -> None:
        """Close every socket at once."""
        for lane in self.lanes:
            lane.close()
