"""What the client's state machine is told (events) and what it wants done (effects)."""

from typing import Literal

import msgspec
from msgspec import Struct

from diptych.open_request import Failed, Finished, Output, PromptScores, Started
from diptych.wire import FromClient, Submit, ToClient, WorkerOrder


class Open(Struct, frozen=True):
    """Start a request; ``submit`` is a template without id."""

    key: int
    submit: Submit
    deadline: float


class Ask(Struct, frozen=True):
    """Wait for a session (``ready``) or ask for the fleet's status, maybe with an order."""

    key: int
    what: Literal["ready", "status"]
    deadline: float
    order: WorkerOrder | None = None


class Abort(Struct, frozen=True):
    """The caller lost interest; nothing more is told about the call."""

    key: int


class LinkUp(Struct, frozen=True):
    """The socket of ``session`` is connected."""

    session: int


class LinkDown(Struct, frozen=True):
    """The socket of ``session`` lost its connection or sent garbage."""

    session: int
    why: str


class LinkTrouble(Struct, frozen=True):
    """The socket of ``session`` fails to connect and goes on trying."""

    session: int
    why: str


class Received(Struct, frozen=True):
    """A message came in on the socket of ``session``."""

    session: int
    message: ToClient


class Oversized(Struct, frozen=True):
    """A ``Submit`` does not fit into a frame; it was not sent."""

    attempt: int
    size: int


class Tick(Struct, frozen=True):
    """Time has passed."""


class Leave(Struct, frozen=True):
    """Cancel everything and say goodbye."""


Event = Open | Ask | Abort | LinkUp | LinkDown | LinkTrouble | Received | Oversized | Tick | Leave


class Ready(Struct, frozen=True):
    """A session is open. ``max_model_len``: tokens of prompt and output together."""

    model: str
    max_model_len: int


class Fleet(Struct, frozen=True):
    """Msgpack of the fleet's status."""

    status: bytes

    def decode(self) -> dict[str, object]:
        """Return the status as plain dicts, lists, strings and numbers."""
        return msgspec.msgpack.decode(self.status, type=dict[str, object])


Update = Started | Output | PromptScores | Finished | Failed | Ready | Fleet


class Dial(Struct, frozen=True):
    """Close the present socket, if any, and connect a fresh one for ``session``."""

    session: int


class HangUp(Struct, frozen=True):
    """Close the present socket."""


class Send(Struct, frozen=True):
    """Send on the present socket."""

    message: FromClient


class Emit(Struct, frozen=True):
    """Tell the caller of ``key``."""

    key: int
    update: Update


Effect = Dial | HangUp | Send | Emit
