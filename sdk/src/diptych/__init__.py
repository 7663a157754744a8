"""Client of Diptych over ZeroMQ: ``Client`` for threads, ``AsyncClient`` for asyncio."""

from diptych.aio import AsyncClient, AsyncStream
from diptych.client import Client, Stream
from diptych.endpoint import Curve, default_endpoint
from diptych.errors import (
    Cancelled,
    ConnectionLost,
    DiptychError,
    IncompatibleGateway,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServerError,
    Timeout,
    TooLarge,
    Unauthorized,
)
from diptych.events import Ready
from diptych.params import Params
from diptych.results import Chunk, Completion
from diptych.wire import (
    Logprob,
    Message,
    PhaseTimes,
    ResponseFormat,
    Timeline,
    TopLogprob,
    Usage,
)

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Chunk",
    "Client",
    "Completion",
    "ConnectionLost",
    "Curve",
    "DiptychError",
    "IncompatibleGateway",
    "InvalidRequest",
    "Logprob",
    "Message",
    "NotFound",
    "Overloaded",
    "Params",
    "PhaseTimes",
    "Ready",
    "ResponseFormat",
    "ServerError",
    "Stream",
    "Timeline",
    "Timeout",
    "TooLarge",
    "TopLogprob",
    "Unauthorized",
    "Usage",
    "default_endpoint",
]
