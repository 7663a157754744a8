"""The two processes by which the doctor tries CUDA IPC: one owns memory, one maps and reads it.

``python -m tools.doctor.ipc_probe own cuda:0`` prints how its memory can be mapped and ends with
its standard input; ``… read cuda:1`` takes such a line and prints what came of it.
"""

import sys
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Struct

from shared.device.cuda import CudaDevice
from shared.device.cuda_layout import PAGE
from shared.device.cuda_mapping import PROBE_SLABS, CudaMapping
from shared.device.cuda_pool import CudaPool
from shared.device.device import Device
from shared.device.open import open_device
from shared.errors import DiptychError, NoPeerAccess
from shared.kv.layout import KvLayout, LayerKv
from shared.messages.fleet import PathReason
from shared.messages.prefill_decode import ArenaDescriptor
from shared.worker.paths import memory_apart

_LAYOUT: Final = KvLayout(dtype="fp16", block_size=16, layers=(LayerKv(1, 8, 8),))


class Probed(Struct, frozen=True):
    """``reason`` as a pair would have it: None where KV comes by CUDA IPC."""

    reason: PathReason | None
    message: str = ""


def own(
    device: Device, tell: Callable[[ArenaDescriptor], None], wait: Callable[[], object]
) -> None:
    """Take a little memory as a worker's pool does, tell how it is mapped, and keep it."""
    memory, pool = device.kv_memory(_LAYOUT, 1)
    tell(pool.descriptor())
    wait()
    pool.close()
    memory.close()


def read(device: Device, arena: ArenaDescriptor) -> Probed:
    """Do the self-test of a decode worker on ``device`` with that memory."""
    memory, pool = device.kv_memory(_LAYOUT, 1)
    assert isinstance(pool, CudaPool)
    stream = pool.side_stream()
    try:
        reason = memory_apart(pool.cuda, arena.cuda)
        if reason is not None:
            return Probed(reason, "a GPU shares no memory between processes")
        slabs = pool.slabs(PROBE_SLABS, PAGE)
        CudaMapping.open(pool, arena, stream, slabs).close()
    except NoPeerAccess as error:
        return Probed("no_peer_access", error.message)
    except DiptychError as error:
        return Probed("cannot_map", error.message)
    finally:
        stream.close()
        pool.close()
        memory.close()
    return Probed(None)


def main() -> int:
    """Return 0, or 1 after a line that says why the device cannot be used."""
    role, name = sys.argv[1:]
    try:
        device = open_device(name)
        assert isinstance(device, CudaDevice)
        if role == "own":
            own(device, lambda arena: _say(arena), sys.stdin.read)
        else:
            _say(read(device, msgspec.json.decode(sys.stdin.readline(), type=ArenaDescriptor)))
    except DiptychError as error:
        _say(Probed("cannot_map", error.message))
        return 1
    return 0


def _say(message: ArenaDescriptor | Probed) -> None:
    print(msgspec.json.encode(message).decode(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
