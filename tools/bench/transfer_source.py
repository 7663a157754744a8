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
    """The pool to make, the size of raw messages, and the address to be reached at."""

    layout: KvLayout
    num_blocks: int
    chunk_bytes: int
    address: str


class SourceReady(Struct, frozen=True, kw_only=True):
    """Where everything is."""

    arena: ArenaDescriptor
    endpoint: str
    raw_endpoint: str


def main() -> None:
    """Serve until standard input ends."""
    spec = msgspec.json.decode(sys.argv[1], type=SourceSpec)
    arena = KvArena.create(spec.layout, spec.num_blocks)
    _fill(arena)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = HostServer(context, f"tcp://{spec.address}:0", arena, worker="bench")
    raw = context.socket(zmq.ROUTER)
    raw.setsockopt(zmq.SNDHWM, RAW_HWM)
    raw.setsockopt(zmq.LINGER, 0)
    raw.bind(f"tcp://{spec.address}:0")
    size = spec.num_blocks * spec.layout.block_bytes
    thread = threading.Thread(target=_serve_raw, args=(raw, size, spec.chunk_bytes), daemon=True)
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


def _fill(arena: KvArena) -> None:
    """Fill a bf16 pool with noise, as a codec expects it: any bytes would make NaNs."""
    dice = np.random.default_rng(1)
    for layer in range(len(arena.layout.layers)):
        for part in arena.raw(layer):
            for block in part:
                noise = dice.standard_normal(block.size // 2, dtype=np.float32)
                block[:] = (noise.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def _serve_raw(socket: "zmq.Socket[bytes]", size: int, chunk: int) -> None:
    """Answer a number by as many bytes, without a copy and without a check."""
    payload = np.ones(-(-size // chunk) * chunk, dtype=np.uint8).data
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        while True:
            peer, wanted = socket.recv_multipart()
            for start in range(0, msgspec.json.decode(wanted, type=int), chunk):
                socket.send(peer, zmq.SNDMORE)
                socket.send(payload[start : start + chunk], copy=False)
    except zmq.ContextTerminated:
        socket.close(linger=0)


if __name__ == "__main__":
    main()
