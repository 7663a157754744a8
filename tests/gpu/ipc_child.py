"""The peer of ``test_arena``: maps the arena described on stdin and tells what it reads there."""

import json
import sys

import msgspec

from shared.device.cuda import CudaDevice
from shared.device.cuda_arena import CudaArena, CudaArenaHandle
from shared.device.open import open_device
from shared.errors import DiptychError
from shared.kv.layout import KvLayout


class Asked(msgspec.Struct):
    handle: CudaArenaHandle
    layout: KvLayout


def main() -> None:
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Asked)
    device = open_device("cuda")
    assert isinstance(device, CudaDevice)
    try:
        arena = CudaArena.open(device.memory, asked.handle, asked.layout)
    except DiptychError as error:
        print(json.dumps({"error": error.code}))
        return
    sums = [float(arena.k(i).float().sum()) for i in range(len(asked.layout.layers))]
    arena.close()
    print(json.dumps({"sums": sums}))


if __name__ == "__main__":
    main()
