"""A reader's socket towards one source of KV, and what waits to be sent on it."""

import logging
import time
from collections import deque
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


class SourceLink:
    """One DEALER, polled by ``poller`` as long as it is open.

    ``nonce`` and ``deadline`` belong to the self-test, which sets ``tested``.

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
        nonce: int,
        deadline: float,
    ) -> None:
        self.peer = peer
        self.rates = rates
        self.nonce = nonce
        self.deadline = deadline
        self.tested = False
        self.outbox: deque[bytes] = deque()
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
        log.warning("nothing could be sent to %s for a while; connecting anew", self.peer.endpoint)
        self.close()
        self.socket = self._connect()

    def _connect(self) -> "zmq.Socket[bytes]":
        peer = self.peer
        socket = connect(self._context, peer.endpoint, peer.identity, _LIMITS, peer.security)
        self._poller.register(socket, zmq.POLLIN)
        return socket
