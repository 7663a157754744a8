"""The table of gateways. A gateway that left takes its requests with it."""

from collections import OrderedDict

from services.router.counters import Counters
from services.router.effects import Outbox
from services.router.records import Gateway
from services.router.requests import Requests
from shared.ids import Incarnation
from shared.messages.gateway_router import GatewayHello, RouterPong, RouterWelcome
from shared.messages.hello import WIRE_VERSION

MAX_GATEWAYS = 256


class Gateways:
    """``timeout``: seconds of silence after which a gateway is gone.

    ``due``: none falls victim to that before this moment.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        timeout: float,
        requests: Requests,
        outbox: Outbox,
        counters: Counters,
    ) -> None:
        self.by_peer: dict[bytes, Gateway] = {}
        self.due = float("inf")
        self._incarnation = incarnation
        self._timeout = timeout
        self._requests = requests
        self._outbox = outbox
        self._counters = counters
        self._dropped: OrderedDict[bytes, None] = OrderedDict()

    def hello(self, peer: bytes, message: GatewayHello, now: float) -> None:
        """Welcome a gateway. The same incarnation keeps its requests, a new one replaces it."""
        known = self.by_peer.get(peer)
        if message.wire_version != WIRE_VERSION or (
            known is None and len(self.by_peer) >= MAX_GATEWAYS
        ):
            if message.wire_version != WIRE_VERSION:
                self._counters.another_version(message.gateway, message.wire_version)
            self._outbox.note(
                f"gateway {message.gateway} not taken in: it speaks wire version "
                f"{message.wire_version}, {WIRE_VERSION} is spoken here, "
                f"{len(self.by_peer)} of {MAX_GATEWAYS} places are taken",
                warning=True,
            )
            return
        for other in list(self.by_peer.values()):
            if other.gateway == message.gateway and other.incarnation != message.incarnation:
                self.drop(other, "it was restarted")
        if self.by_peer.get(peer) is None:
            known = Gateway(
                peer=peer,
                gateway=message.gateway,
                incarnation=message.incarnation,
                last_heard=now,
            )
            self.by_peer[peer] = known
            self._dropped.pop(peer, None)
            self._outbox.note(f"gateway {message.gateway} joined")
        gateway = self.by_peer[peer]
        gateway.last_heard = now
        self.due = min(self.due, now + self._timeout)
        self._outbox.gateway(gateway, RouterWelcome(incarnation=self._incarnation))

    def stranger(self, peer: bytes) -> None:
        """Answer a gateway that is not in the table.

        One from before a restart of this router learns the new incarnation. One that was
        dropped hears nothing until it says hello: silence is what makes it do so.
        """
        self._counters.late_messages += 1
        if peer not in self._dropped:
            self._outbox.to_stranger(peer, RouterPong(incarnation=self._incarnation))

    def drop(self, gateway: Gateway, why: str) -> None:
        """Forget a gateway and cancel its requests."""
        for request in list(gateway.requests.values()):
            self._requests.end(request)
        del self.by_peer[gateway.peer]
        self._dropped[gateway.peer] = None
        if len(self._dropped) > MAX_GATEWAYS:
            self._dropped.popitem(last=False)
        self._outbox.note(f"gateway {gateway.gateway} dropped: {why}", warning=True)

    def tick(self, now: float) -> None:
        """Drop the silent."""
        self.due = float("inf")
        for gateway in list(self.by_peer.values()):
            if now - gateway.last_heard > self._timeout:
                self.drop(gateway, f"silent for {now - gateway.last_heard:.1f} s")
            else:
                self.due = min(self.due, gateway.last_heard + self._timeout)

    def forgive(self, seconds: float, now: float) -> None:
        """The router itself stood still so long: nobody could be heard."""
        for gateway in self.by_peer.values():
            gateway.last_heard = min(now, gateway.last_heard + seconds)

    def check(self) -> None:
        """Raise ``AssertionError`` unless the table is within its bounds."""
        assert len(self.by_peer) <= MAX_GATEWAYS and len(self._dropped) <= MAX_GATEWAYS
        for peer, gateway in self.by_peer.items():
            assert gateway.peer == peer and peer not in self._dropped
            assert self.due <= gateway.last_heard + self._timeout
            for request_id in gateway.requests:
                assert request_id in self._requests.open
