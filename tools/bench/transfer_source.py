"""The sending process of ``diptych bench transfer``: a filled pool, and sockets to read it by.

``python -m tools.bench.transfer_source SPEC`` prints one line of JSON when it is ready and
ends with its standard input.
"""

import sys
import threading
from typing import Final

import msgspec
import numpy as np
import zmq
from msgspec import Struct

from shared.kv.arena import KvArena
from shared.kv.layout import KvLayout
from shared.messages.prefill_decode import ArenaDescriptor
from shared.transport.bulk.server import HostServer

RAW_HWM: Final = 16


class SourceSpec(Struct, frozen=True, kw_only=True):
    """The pool to make and the size and number of raw messages for each who asks."""

    layout: KvLayout
    num_blocks: int
    chunk_bytes: int
    raw_messages: int


class SourceReady(Struct, frozen=True, kw_only=True):
    """Where everything is."""

    arena: ArenaDescriptor
    endpoint: str
    raw_endpoint: str


def main() -> None:
    """Serve until standard input ends."""
    spec = msgspec.json.decode(sys.argv[1], type=SourceSpec)
    arena = KvArena.create(spec.layout, spec.num_blocks)
    dice = np.random.default_rng(1)
    for layer in range(len(spec.layout.layers)):
        for part in arena.raw(layer):
            part[:] = dice.integers(0, 256, part.shape, dtype=np.uint8)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = HostServer(context, "tcp://127.0.0.1:0", arena, worker="bench")
    raw = context.socket(zmq.ROUTER)
    raw.setsockopt(zmq.SNDHWM, RAW_HWM)
    raw.setsockopt(zmq.LINGER, 0)
    raw.bind("tcp://127.0.0.1:0")
    thread = threading.Thread(target=_serve_raw, args=(raw, spec), daemon=True)
    thread.start()
    ready = SourceReady(
        arena=arena.descriptor(),
        endpoint=server.endpoint,
        raw_endpoint=raw.get_string(zmq.LAST_ENDPOINT).rstrip("\0"),
    )
    print(msgspec.json.encode(ready).decode(), flush=True)
    sys.stdin.read()
    server.close()
    context.term()
    thread.join()


def _serve_raw(socket: "zmq.Socket[bytes]", spec: SourceSpec) -> None:
    """Answer each message by ``raw_messages`` messages without a copy and without a check."""
    payload = np.ones(16 * spec.chunk_bytes, dtype=np.uint8).data
    size = spec.chunk_bytes
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        while True:
            peer = socket.recv_multipart()[0]
            for number in range(spec.raw_messages):
                start = number % 16 * size
                socket.send(peer, zmq.SNDMORE)
                socket.send(payload[start : start + size], copy=False)
    except zmq.ContextTerminated:
        socket.close(linger=0)


if __name__ == "__main__":
    main()
