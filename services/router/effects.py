"""Everything the router can ask of its shell, and the list it is collected in."""

from msgspec import Struct

from services.router.records import Gateway, Worker
from shared.ids import HostId, RequestId
from shared.messages.gateway_router import ToGateway
from shared.messages.router_worker import ToWorker


class SendWorker(Struct, frozen=True):
    """Send to a worker; a failure comes back as ``WorkerUnreachable``."""

    peer: bytes
    message: ToWorker


class SendGateway(Struct, frozen=True):
    """Send to a gateway; a failure comes back as ``GatewayUnreachable``."""

    peer: bytes
    message: ToGateway


class WatchProcess(Struct, frozen=True):
    """Report the end of this process as ``WorkerExited``, if it lives on this host."""

    peer: bytes
    pid: int
    host: HostId


class UnwatchProcess(Struct, frozen=True):
    """The worker is forgotten."""

    peer: bytes


class Note(Struct, frozen=True):
    """One line for the log. ``frequent``: one failure can cause thousands of its kind."""

    text: str
    warning: bool = False
    frequent: bool = False


class Stop(Struct, frozen=True):
    """The drain is over: nothing is open."""


Effect = SendWorker | SendGateway | WatchProcess | UnwatchProcess | Note | Stop


class Outbox:
    """Collects the effects of one event, in order."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []

    def take(self) -> list[Effect]:
        """Hand over what was collected and start anew."""
        effects, self.effects = self.effects, []
        return effects

    def worker(self, worker: Worker, message: ToWorker) -> None:
        """Send to a worker."""
        self.effects.append(SendWorker(worker.peer, message))

    def to_peer(self, peer: bytes, message: ToWorker) -> None:
        """Answer a worker that is not in the table."""
        self.effects.append(SendWorker(peer, message))

    def gateway(self, gateway: Gateway, message: ToGateway) -> None:
        """Send to a gateway."""
        self.effects.append(SendGateway(gateway.peer, message))

    def to_stranger(self, peer: bytes, message: ToGateway) -> None:
        """Answer a gateway that is not in the table."""
        self.effects.append(SendGateway(peer, message))

    def note(self, text: str, *, warning: bool = False, frequent: bool = False) -> None:
        """Put a line in the log."""
        self.effects.append(Note(text, warning, frequent))

    def note_request(self, request: RequestId, text: str) -> None:
        """Put a warning about one request in the log, unless there are too many."""
        self.effects.append(Note(f"request {request}: {text}", warning=True, frequent=True))
