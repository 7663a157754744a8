"""Identifiers that cross process borders."""

import os
from typing import NewType

RequestId = NewType("RequestId", str)
"""Made by the gateway, never by a client; unique for the life of the system."""

TenantId = NewType("TenantId", str)
"""Salt of the first block hash; ``""`` is the local tenant."""

WorkerId = NewType("WorkerId", str)
"""Configured name of a worker such as ``prefill-0``; survives restarts."""

GatewayId = NewType("GatewayId", str)
"""Configured name of a gateway; survives restarts."""

Incarnation = NewType("Incarnation", int)
"""Random per process start; tells a restarted peer from the one known before."""

DispatchId = NewType("DispatchId", int)
"""One attempt of the router to run one phase of one request on one worker.

A late message about an earlier attempt carries an old dispatch id and is dropped.
"""

TransferId = NewType("TransferId", int)
"""The hand-over of one prefill's KV: the ``DispatchId`` of that prefill."""

BlockId = NewType("BlockId", int)
"""Index of a block in one worker's pool."""

BlockHash = NewType("BlockHash", bytes)
"""16-byte chained content hash of a full block (``shared.kv.hashing``)."""

HostId = NewType("HostId", str)
"""Machine + boot + pid namespace: equal only where memory can be shared."""


def new_incarnation() -> Incarnation:
    """Return a random non-zero 53-bit number (exact in every msgpack and JSON reader)."""
    return Incarnation(1 + int.from_bytes(os.urandom(7), "little") % (2**53 - 1))
