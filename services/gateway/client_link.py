"""The ZeroMQ endpoint for the SDK: sessions of clients (see ``diptych.wire``)."""

import asyncio
import logging

import msgspec
import zmq
from msgspec import Struct

from diptych import wire
from services.gateway.client_request import wire_error
from services.gateway.client_session import ClientSession
from services.gateway.errors import RequestFailed
from services.gateway.front import Front
from shared.errors import (
    DiptychError,
    IncompatiblePeer,
    InvalidRequest,
    NoWorker,
    Overloaded,
    Unauthorized,
)
from shared.ids import Incarnation, TenantId, WorkerId
from shared.messages.gateway_router import WorkerOrder
from shared.transport.link import LinkLimits, RouterLink
from shared.transport.security import CurveServer

log = logging.getLogger(__name__)

MAX_SESSIONS = 1024
_STATUS_DEADLINE = 2.0
_MAX_STATUS = 64


class _Client(Struct):
    peer: bytes
    incarnation: int
    session: ClientSession


class ClientLink:
    """Owns the socket; at most ``MAX_SESSIONS`` sessions, one per client incarnation.

    Raises:
        ResourceMissing: the endpoint is in use or not available.
        BadConfig: not an endpoint.
    """

    def __init__(
        self,
        front: Front,
        incarnation: Incarnation,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        security: CurveServer | None,
    ) -> None:
        self.dropped = 0
        self._front = front
        self._incarnation = incarnation
        self._by_peer: dict[bytes, _Client] = {}
        self._by_incarnation: dict[int, _Client] = {}
        self._status_tasks: set[asyncio.Task[None]] = set()
        self._leaving = False
        self._link: RouterLink[wire.FromClient, wire.ToClient] = RouterLink(
            context,
            endpoint,
            wire.FromClient,
            self._on_message,
            limits=LinkLimits(max_frame=wire.MAX_FRAME),
            security=security,
        )

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return self._link.endpoint

    @property
    def rejected(self) -> int:
        """Frames that were no messages."""
        return self._link.rejected

    @property
    def num_sessions(self) -> int:
        return len(self._by_peer)

    def tick(self) -> float:
        """End the sessions of clients that fell silent; return when to look again."""
        now = self._front.clock.now()
        due = now + wire.PEER_TIMEOUT
        for client in list(self._by_peer.values()):
            if now - client.session.heard_at > wire.PEER_TIMEOUT:
                self._forget(client)
            else:
                due = min(due, client.session.heard_at + wire.PEER_TIMEOUT)
        return due

    def say_goodbye(self) -> None:
        """Tell every client to go elsewhere; their requests stay unended."""
        self._leaving = True
        for client in list(self._by_peer.values()):
            self._link.send(client.peer, wire.Goodbye())
            self._forget(client)

    def close(self) -> None:
        """End all sessions and close the socket."""
        for client in list(self._by_peer.values()):
            self._forget(client)
        for task in self._status_tasks:
            task.cancel()
        self._link.close()

    def _on_message(self, peer: bytes, message: wire.FromClient) -> None:
        client = self._by_peer.get(peer)
        if client is not None:
            client.session.heard_at = self._front.clock.now()
        if isinstance(message, wire.Ping):
            number = 0 if client is None else client.session.number
            self._send(peer, wire.Pong(incarnation=self._incarnation, session=number))
        elif isinstance(message, wire.ClientHello):
            self._hello(peer, message)
        elif client is None:
            self.dropped += 1
        elif isinstance(message, wire.Submit):
            client.session.submit(message)
        elif isinstance(message, wire.Cancel):
            client.session.cancel(message.id)
        elif isinstance(message, wire.StatusQuery):
            self._status(client, message)
        else:
            self._forget(client)

    def _hello(self, peer: bytes, hello: wire.ClientHello) -> None:
        try:
            tenant = self._admit(peer, hello)
        except DiptychError as error:
            refusal = wire_error(error.payload())
            assert refusal is not None
            self._send(peer, wire.Refused(error=refusal))
            return
        earlier = self._by_incarnation.get(hello.incarnation)
        if earlier is None or earlier.session.number < hello.session:
            session = ClientSession(
                self._front,
                hello,
                tenant,
                lambda message: self._send(peer, message),
                self._front.clock.now(),
            )
            if earlier is not None:
                session.last_id = earlier.session.last_id
                self._forget(earlier)
            client = _Client(peer, hello.incarnation, session)
            self._by_peer[peer] = self._by_incarnation[hello.incarnation] = client
        served = self._front.served
        welcome = wire.Welcome(
            incarnation=self._incarnation,
            session=hello.session,
            model=served.model,
            max_model_len=served.limits.max_model_len,
        )
        self._send(peer, welcome)

    def _admit(self, peer: bytes, hello: wire.ClientHello) -> TenantId:
        if hello.wire_version != wire.WIRE_VERSION:
            raise IncompatiblePeer(
                f"the client speaks wire version {hello.wire_version}, this gateway "
                f"{wire.WIRE_VERSION}: install matching versions of diptych"
            )
        if peer != wire.routing_id(hello.incarnation, hello.session):
            raise InvalidRequest("the routing id is not that of this session", param="session")
        tenant = self._front.keys.tenant_of_key(hello.api_key)
        if self._leaving:
            raise NoWorker("the gateway is shutting down", retry_after=1.0)
        known = self._by_incarnation.get(hello.incarnation)
        if known is None and len(self._by_peer) >= MAX_SESSIONS:
            raise Overloaded(f"{MAX_SESSIONS} clients are connected", retry_after=5.0)
        if known is not None and known.session.number > hello.session:
            raise InvalidRequest("a later session of this client is open", param="session")
        return tenant

    def _status(self, client: _Client, message: wire.StatusQuery) -> None:
        refusal: DiptychError | None = None
        if not self._front.keys.operates(client.session.tenant):
            refusal = Unauthorized("this key's tenant is not in `gateway.operators`")
        elif len(self._status_tasks) >= _MAX_STATUS:
            refusal = Overloaded("too many status queries", retry_after=1.0)
        if refusal is not None:
            error = wire_error(refusal.payload())
            self._send(client.peer, wire.StatusReply(query=message.query, error=error))
            return
        task = asyncio.get_running_loop().create_task(self._answer_status(client.peer, message))
        self._status_tasks.add(task)
        task.add_done_callback(self._status_tasks.discard)

    async def _answer_status(self, peer: bytes, message: wire.StatusQuery) -> None:
        query, order = message.query, None
        if message.order is not None:
            order = WorkerOrder(worker=WorkerId(message.order.worker), role=message.order.role)
        try:
            status = await self._front.broker.fleet(_STATUS_DEADLINE, order)
        except (NoWorker, RequestFailed) as error:
            payload = error.payload if isinstance(error, RequestFailed) else error.payload()
            answer = wire.StatusReply(query=query, error=wire_error(payload))
        else:
            answer = wire.StatusReply(query=query, fleet=msgspec.msgpack.encode(status))
        self._send(peer, answer)

    def _send(self, peer: bytes, message: wire.ToClient) -> bool:
        if self._link.send(peer, message):
            return True
        client = self._by_peer.get(peer)
        if client is not None:
            log.info("a client cannot be reached any more: its requests are cancelled")
            self._forget(client)
        return False

    def _forget(self, client: _Client) -> None:
        if self._by_peer.get(client.peer) is client:
            del self._by_peer[client.peer]
        if self._by_incarnation.get(client.incarnation) is client:
            del self._by_incarnation[client.incarnation]
        client.session.close()
