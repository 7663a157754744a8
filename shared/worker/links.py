"""The worker's sockets: to the router, from its readers, and to its sources."""

import asyncio
import logging
from collections.abc import Callable

import zmq

from shared.config import SecuritySection
from shared.device.device import SharedKv
from shared.errors import DiptychError, ErrorPayload
from shared.fault_rules import FaultsSection
from shared.ids import Incarnation, WorkerId
from shared.messages.hello import UnreadHello
from shared.messages.prefill_decode import ArenaDescriptor, FromDecode, ToDecode, UnreadWelcome
from shared.messages.router_worker import FromWorker, ToWorker
from shared.transport.bulk.server import HostServer
from shared.transport.bulk.stage import OutStage
from shared.transport.link import DealerLink, Receive, RouterLink
from shared.transport.liveness import PidWatch, watch_pid
from shared.transport.security import security_for
from shared.worker.events import Event, ReaderSaid, RouterSaid, SourceKey, SourceLost, SourceSaid

log = logging.getLogger(__name__)


def routing_id(worker: WorkerId, incarnation: Incarnation) -> bytes:
    """Return the routing id of this life of a worker on every link it connects."""
    return f"{worker}#{incarnation}".encode()


class Links:
    """All sockets of one worker; what arrives becomes an event.

    ``io_threads`` carry the bytes of readers and router. Links to sources have a thread of their
    own: libzmq resolves names in it, and a name server that is silent holds it up for 10 s, in
    which the router would give this worker up.

    Raises:
        ResourceMissing: the KV endpoint cannot be bound.
        BadConfig: an endpoint that needs keys has none.
    """

    def __init__(
        self,
        identity: bytes,
        kv_endpoint: str,
        router_endpoint: str,
        security: SecuritySection,
        post: Callable[[Event], None],
        io_threads: int = 1,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._identity = identity
        self._security = security
        self._post = post
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads)
        self._to_sources: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
        self._sources: dict[SourceKey, DealerLink[ToDecode | UnreadWelcome, FromDecode]] = {}
        self._watches: dict[SourceKey, PidWatch] = {}
        self._rejected_before = 0
        self._server: HostServer | None = None
        try:
            self.readers: RouterLink[FromDecode | UnreadHello, ToDecode] = RouterLink(
                self._context,
                kv_endpoint,
                Receive(FromDecode, UnreadHello),
                lambda peer, message: post(ReaderSaid(peer, message)),
                security=security_for(kv_endpoint, security, "bind"),
            )
            self.router: DealerLink[ToWorker, FromWorker] = DealerLink(
                self._context,
                router_endpoint,
                identity,
                ToWorker,
                lambda message: post(RouterSaid(message)),
                security=security_for(router_endpoint, security, "connect"),
            )
        except BaseException:
            self._context.destroy(linger=0)
            self._to_sources.destroy(linger=0)
            raise

    @property
    def rejected(self) -> int:
        """Malformed frames on all links so far."""
        live = sum(link.rejected for link in self._sources.values())
        bulk = 0 if self._server is None else self._server.stats.rejected
        return self._rejected_before + live + self.readers.rejected + self.router.rejected + bulk

    def serve(
        self,
        endpoint: str,
        arena: SharedKv,
        faults: FaultsSection | None,
        stage: OutStage | None = None,
    ) -> None:
        """Let readers fetch KV over sockets, with faults if the deployment asks for them.

        ``stage`` as for ``HostServer``.
        """
        if faults is not None and faults.chunks:
            log.warning("%d faults are injected into KV chunks (`faults:`)", len(faults.chunks))
        self._server = HostServer(
            self._context,
            endpoint,
            arena,
            worker=self._identity.decode().partition("#")[0],
            security=security_for(endpoint, self._security, "bind"),
            faults=faults,
            stage=stage,
        )

    def connect(self, source: SourceKey, endpoint: str) -> None:
        """Open a link to a prefill worker; an endpoint that cannot be is a ``SourceLost``."""
        try:
            self._sources[source] = DealerLink(
                self._to_sources,
                endpoint,
                self._identity,
                Receive(ToDecode, UnreadWelcome),
                lambda message: self._post(SourceSaid(source, message)),
                security=security_for(endpoint, self._security, "connect"),
            )
        except DiptychError as error:
            self._lost(source, error.payload())

    def to_source(self, source: SourceKey, message: FromDecode) -> None:
        """Send to a source; one whose queue is full is given up."""
        link = self._sources.get(source)
        if link is not None and not link.send(message):
            text = f"{source.worker} takes no messages"
            self._lost(source, ErrorPayload(code="transfer_failed", message=text, retryable=True))

    def watch(self, source: SourceKey, arena: ArenaDescriptor) -> None:
        """Report the end of the process that owns the arena; one that cannot be watched is lost."""
        text = f"the process of {source.worker} ended"
        error = ErrorPayload(code="transfer_failed", message=text, retryable=True)
        try:
            self._watches[source] = watch_pid(
                self._loop, arena.pid, lambda: self._post(SourceLost(source, error))
            )
        except DiptychError as missing:
            self._lost(source, missing.payload())

    def disconnect(self, source: SourceKey) -> None:
        """Close the link to a source and its watch."""
        watch = self._watches.pop(source, None)
        if watch is not None:
            watch.cancel()
        link = self._sources.pop(source, None)
        if link is not None:
            self._rejected_before += link.rejected
            link.close()

    def close(self) -> None:
        """Close every socket."""
        for source in list(self._sources):
            self.disconnect(source)
        if self._server is not None:
            self._server.close()
        self.readers.close()
        self.router.close()
        self._context.term()
        self._to_sources.term()

    def _lost(self, source: SourceKey, error: ErrorPayload) -> None:
        self._loop.call_soon(self._post, SourceLost(source, error))
