"""The sending process of ``diptych bench transfer``: a filled pool, and sockets to read it by.

``python -m tools.bench.transfer_source SPEC`` prints one line of JSON when it is ready and
ends with its standard input.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
import torch
import zmq
from msgspec import Struct

from shared.device import open as devices
from shared.device.cuda_pool import CudaPool
from shared.device.cuda_stage import CudaLift
from shared.device.device import SharedKv
from shared.errors import DiptychError
from shared.kv.arena import KvArena
from shared.kv.layout import KvLayout
from shared.messages.prefill_decode import ArenaDescriptor, NixlDescriptor
from shared.transport.bulk.nixl import NixlEnd
from shared.transport.bulk.payload import Bytes
from shared.transport.bulk.server import HostServer
from shared.transport.bulk.stage import OutStage, in_memory

RAW_HWM: Final = 16


class SourceSpec(Struct, frozen=True, kw_only=True):
    """The pool to make, the size of raw messages, and the address to be reached at.

    On a GPU twice ``slots`` chunks are staged, as a worker does. ``sockets``: threads that carry
    bytes, as a worker has for so many. ``nixl``: offer the pool by that library, too.
    """

    layout: KvLayout
    num_blocks: int
    chunk_bytes: int
    address: str
    device: str = "cpu"
    slots: int = 32
    sockets: int = 1
    nixl: bool = False


class SourceReady(Struct, frozen=True, kw_only=True):
    """Where everything is."""

    arena: ArenaDescriptor
    endpoint: str
    raw_endpoint: str
    nixl: NixlDescriptor | None = None


def main() -> None:
    """Serve until standard input ends."""
    spec = msgspec.json.decode(sys.argv[1], type=SourceSpec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started us
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(spec.sockets)
    try:
        arena, stage = _filled(spec)
        server = HostServer(context, f"tcp://{spec.address}:0", arena, worker="bench", stage=stage)
        nixl = NixlEnd("bench-source", in_memory(arena), 1 << 12) if spec.nixl else None
    except DiptychError as error:
        sys.exit(error.message)
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
        nixl=None if nixl is None else nixl.descriptor,
    )
    print(msgspec.json.encode(ready).decode(), flush=True)
    sys.stdin.read()
    server.close()
    if nixl is not None:
        nixl.close()
    context.term()
    thread.join()


def contents(layout: KvLayout, num_blocks: int) -> Iterator[tuple[int, int, Bytes]]:
    """Yield layer, part (K 0, V 1) and bytes [num_blocks, bytes per block] of a filled bf16 pool.

    They are noise, as a codec expects it: any bytes would make NaNs.
    """
    dice = np.random.default_rng(1)
    for layer in range(len(layout.layers)):
        for part, unit in enumerate((layout.k_block_bytes(layer), layout.v_block_bytes(layer))):
            noise = dice.standard_normal((num_blocks, unit // 2), dtype=np.float32)
            yield layer, part, (noise.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def _filled(spec: SourceSpec) -> tuple[SharedKv, OutStage | None]:
    """Return the pool, and what its chunks are staged in on the way out."""
    if spec.device == "cpu":
        arena = KvArena.create(spec.layout, spec.num_blocks)
        for layer, part, content in contents(spec.layout, spec.num_blocks):
            arena.raw(layer)[part][:] = content
        return arena, None
    device = devices.open_device(spec.device)
    memory, pool = device.kv_memory(spec.layout, spec.num_blocks)
    assert isinstance(pool, CudaPool)
    for layer, part, content in contents(spec.layout, spec.num_blocks):
        there = (memory.k(layer), memory.v(layer))[part][: spec.num_blocks]
        there.view(spec.num_blocks, -1).view(torch.uint8).copy_(torch.from_numpy(content))
    device.synchronise()
    return pool, CudaLift(pool, 2 * spec.slots, spec.chunk_bytes)


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
