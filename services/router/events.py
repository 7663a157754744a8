"""Everything that can happen to the router. ``peer`` is the routing id of a connection."""

from msgspec import Struct

from shared.ids import WorkerId
from shared.messages.fleet import Role
from shared.messages.gateway_router import FromGateway
from shared.messages.hello import UnreadHello
from shared.messages.router_worker import FromWorker


class WorkerMessage(Struct, frozen=True):
    """A worker spoke."""

    peer: bytes
    message: FromWorker | UnreadHello


class WorkerUnreachable(Struct, frozen=True):
    """A message to this worker could not be handed to the socket."""

    peer: bytes


class WorkerExited(Struct, frozen=True):
    """The kernel says the worker's process is gone."""

    peer: bytes


class GatewayMessage(Struct, frozen=True):
    """A gateway spoke."""

    peer: bytes
    message: FromGateway


class GatewayUnreachable(Struct, frozen=True):
    """A message to this gateway could not be handed to the socket."""

    peer: bytes


class Tick(Struct, frozen=True):
    """Time passed. ``rejected_frames`` is the links' total of malformed frames so far."""

    rejected_frames: int = 0


class DrainRouter(Struct, frozen=True):
    """The process was asked to end."""


class DrainWorkerRequested(Struct, frozen=True):
    """An operator wants this worker empty; what runs there finishes."""

    worker: WorkerId


class ChangeRole(Struct, frozen=True):
    """An operator wants this worker in another role: it is drained first. Ends a drain."""

    worker: WorkerId
    role: Role


Event = (
    WorkerMessage
    | WorkerUnreachable
    | WorkerExited
    | GatewayMessage
    | GatewayUnreachable
    | Tick
    | DrainRouter
    | DrainWorkerRequested
    | ChangeRole
)
