"""One worker's KV pool: torch tensors over a memfd that peers on the host can map.

The mapping starts with a header page (magic, version, arena id, size, block count, layout
fingerprint), followed by one uint64 generation per block and, per layer with own storage, K
``[num_blocks, block_size, heads, k_dim]`` and V ``[num_blocks, block_size, heads, v_dim]``, in
int8 four more of each, which are the fp32 scale of what precedes them;
every region starts on a page. A memfd has no name: the kernel frees it with its last user,
even after ``kill -9``, and a reader's mapping outlives its owner.
"""

import contextlib
import errno
import fcntl
import os
import stat
import struct
import warnings
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from shared.errors import IncompatiblePeer, ResourceMissing, TransferFailed
from shared.kv.dtypes import TORCH_DTYPES
from shared.kv.layout import KvLayout
from shared.kv.mapping import map_file, take_huge_pages
from shared.kv.memory import available_memory
from shared.messages.prefill_decode import ArenaDescriptor

ARENA_VERSION: Final = 1
_MAGIC = b"DIPTYCH\x00"
KV_MEMFD: Final = "diptych-kv"
"""Name of the memory file of every arena, as proc shows it."""
_HEADER = struct.Struct("<8sIIQQQ32s")  # magic, version, page, arena id, size, blocks, layout
_PAGE = 4096
HEADER_BYTES: Final = _PAGE
"""Before the generations (uint64, one per block) lies the header, which ``check_header`` reads."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Bytes2d = NDArray[np.uint8]


def arena_size(layout: KvLayout, num_blocks: int) -> int:
    """Return the bytes of an arena: ``num_blocks * layout.block_bytes`` + header and padding."""
    return _Regions(layout, num_blocks).size


def region_offsets(layout: KvLayout, num_blocks: int) -> list[tuple[int, int]]:
    """Return, per layer, how many bytes after an arena's start its K and its V begin."""
    regions = _Regions(layout, num_blocks)
    owners = map(layout.owner, range(len(layout.layers)))
    return [(regions.k[owner], regions.v[owner]) for owner in owners]


class KvArena:
    """The mapped pool, made by ``create`` (writable) or ``open`` (a peer's, read-only).

    ``generations`` is uint64 ``[num_blocks]`` in shared memory: the owner's ``BlockPool``
    counts there and readers compare after each copy.
    """

    def __init__(
        self,
        layout: KvLayout,
        memory: memoryview,
        descriptor: ArenaDescriptor,
        owned_fd: int | None,
    ) -> None:
        self.layout = layout
        self.num_blocks = descriptor.num_blocks
        self.read_only = owned_fd is None
        self._descriptor = descriptor
        self._fd = owned_fd
        self._memory: memoryview | None = memory
        self.generations: NDArray[np.uint64] = np.frombuffer(
            memory, dtype="<u8", count=self.num_blocks, offset=_PAGE
        )
        regions = _Regions(layout, self.num_blocks)
        self._raw: list[tuple[Bytes2d, Bytes2d]] = []
        self._k: list[torch.Tensor] = []
        self._v: list[torch.Tensor] = []
        with _read_only_tensors_allowed():
            for index, kv in enumerate(layout.layers):
                owner = layout.owner(index)
                k = self._bytes(memory, regions.k[owner], layout.k_block_bytes(index))
                v = self._bytes(memory, regions.v[owner], layout.v_block_bytes(index))
                self._raw.append((k, v))
                self._k.append(self._tensor(k, kv.heads, layout.width(kv.k_dim)))
                self._v.append(self._tensor(v, kv.heads, layout.width(kv.v_dim)))

    @classmethod
    def create(cls, layout: KvLayout, num_blocks: int) -> "KvArena":
        """Make a new arena, zeroed, with all generations 0.

        Its memory is taken from the machine now, in huge pages where the kernel has them.

        Raises:
            ResourceMissing: not enough memory is available, or no memfd can be made.
        """
        if num_blocks < 1:
            raise ResourceMissing(
                "the KV memory holds no block: "
                f"one block of {layout.block_size} tokens takes {layout.block_bytes} bytes"
            )
        size = arena_size(layout, num_blocks)
        _require_memory(size)
        try:
            fd = os.memfd_create(KV_MEMFD, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise ResourceMissing(f"cannot create shared memory for KV: {error}") from error
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            memory = map_file(fd, size, writable=True)
        except OSError as error:
            os.close(fd)
            raise ResourceMissing(f"cannot map {size} bytes for KV: {error}") from error
        take_huge_pages(memory)
        arena_id = 1 | int.from_bytes(os.urandom(8), "little") >> 1
        fingerprint = layout.fingerprint().encode()
        _HEADER.pack_into(
            memory, 0, _MAGIC, ARENA_VERSION, _PAGE, arena_id, size, num_blocks, fingerprint
        )
        descriptor = ArenaDescriptor(
            pid=os.getpid(),
            fd=fd,
            size=size,
            num_blocks=num_blocks,
            arena_id=arena_id,
            dtype=layout.dtype,
        )
        return cls(layout, memory, descriptor, fd)

    @classmethod
    def open(cls, descriptor: ArenaDescriptor, layout: KvLayout) -> "KvArena":
        """Map a peer's arena read-only after checking that it is the one described.

        Raises:
            IncompatiblePeer: another arena version, layout, or a size that cannot fit it.
            TransferFailed: the peer is gone, its pid or fd is someone else's by now, or
                access is denied.
        """
        where = f"/proc/{descriptor.pid}/fd/{descriptor.fd}"
        if descriptor.num_blocks < 1 or descriptor.size != arena_size(
            layout, descriptor.num_blocks
        ):
            raise IncompatiblePeer(
                f"the KV arena at {where} is announced with {descriptor.num_blocks} blocks in "
                f"{descriptor.size} bytes, which is not this model's layout"
            )
        try:
            fd = _open_memfd(where)
        except OSError as error:
            raise TransferFailed(f"cannot open the KV arena {where}: {error}") from error
        try:
            memory = _map_verified(fd, descriptor, layout, where)
        finally:
            os.close(fd)
        return cls(layout, memory, descriptor, None)

    def k(self, layer: int) -> torch.Tensor:
        """Return K ``[num_blocks, block_size, heads, width of k_dim]``, no copy."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """Return V ``[num_blocks, block_size, heads, width of v_dim]``, no copy."""
        return self._v[layer]

    def raw(self, layer: int) -> tuple[Bytes2d, Bytes2d]:
        """Return the bytes of K and V as uint8 ``[num_blocks, bytes per block]``, no copy."""
        return self._raw[layer]

    @property
    def address(self) -> int:
        """Where the arena lies in this process, for libraries that know memory by address."""
        assert self._memory is not None
        return int(np.frombuffer(self._memory, dtype=np.uint8, count=1).ctypes.data)

    def descriptor(self) -> ArenaDescriptor:
        """Return what a peer needs to ``open`` this arena."""
        return self._descriptor

    def close(self) -> None:
        """Give memory and file descriptors back; the second call does nothing.

        While someone still holds a tensor of this arena the mapping stays valid for it and
        goes away with that tensor.
        """
        self._k, self._v, self._raw = [], [], []
        self.generations = np.empty(0, dtype="<u8")
        self._memory = None
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _bytes(self, memory: memoryview, offset: int, block_bytes: int) -> Bytes2d:
        count = self.num_blocks * block_bytes
        flat = np.frombuffer(memory, dtype=np.uint8, count=count, offset=offset)
        return flat.reshape(self.num_blocks, block_bytes)

    def _tensor(self, raw: Bytes2d, heads: int, dim: int) -> torch.Tensor:
        # Through numpy, which pins the mapping: torch alone lets it be unmapped under a tensor.
        flat = torch.frombuffer(raw, dtype=TORCH_DTYPES[self.layout.dtype])
        return flat.view(self.num_blocks, self.layout.block_size, heads, dim)


class _Regions:
    """Byte offsets of every region, by owning layer."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.k: dict[int, int] = {}
        self.v: dict[int, int] = {}
        end = _PAGE + _pages(8 * num_blocks)
        for layer in range(len(layout.layers)):
            if layout.owner(layer) == layer:
                self.k[layer] = end
                end += _pages(num_blocks * layout.k_block_bytes(layer))
                self.v[layer] = end
                end += _pages(num_blocks * layout.v_block_bytes(layer))
        self.size = end


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _require_memory(size: int) -> None:
    available = available_memory()
    if size > available:
        raise ResourceMissing(
            f"KV needs {size >> 20} MiB of memory but only {available >> 20} MiB are "
            "available; lower `kv_memory` in the deployment file or free memory"
        )


@contextlib.contextmanager
def _read_only_tensors_allowed() -> Iterator[None]:
    """Silence torch's note on read-only buffers: nothing writes to a peer's arena."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        yield


def _open_memfd(where: str) -> int:
    """Open a proc link that must be one of our memfds, without waking any other kind of file."""
    target = os.readlink(where)
    if not target.startswith(f"/memfd:{KV_MEMFD}"):
        raise OSError(errno.ESTALE, f"it is {target!r}, not a KV arena (the owner restarted?)")
    return os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


def _map_verified(fd: int, descriptor: ArenaDescriptor, layout: KvLayout, where: str) -> memoryview:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != descriptor.size:
        raise TransferFailed(
            f"the KV arena {where} has {status.st_size} bytes, {descriptor.size} were announced"
        )
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise TransferFailed(f"the KV arena {where} could still be truncated (seals missing)")
    header = os.pread(fd, _HEADER.size, 0)
    check_header(header, descriptor, layout, where)
    try:
        memory = map_file(fd, descriptor.size, writable=False)
    except OSError as error:
        raise TransferFailed(f"cannot map the KV arena {where}: {error}") from error
    # The random arena id is the canary: the mapping must show what the owner announced.
    if memory[: _HEADER.size] != header:
        raise TransferFailed(f"the mapping of the KV arena {where} shows other bytes")
    return memory


def check_header(header: bytes, descriptor: ArenaDescriptor, layout: KvLayout, where: str) -> None:
    """Check that the first bytes of an arena are those of the one described.

    Raises:
        IncompatiblePeer: another arena version or layout.
        TransferFailed: no arena, or another one.
    """
    header = header[: _HEADER.size]
    magic, version, page, arena_id, size, blocks, fingerprint = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise TransferFailed(f"{where} is not a KV arena (bad magic)")
    if (version, page) != (ARENA_VERSION, _PAGE):
        raise IncompatiblePeer(
            f"the KV arena {where} has version {version}, this process reads {ARENA_VERSION}"
        )
    if arena_id != descriptor.arena_id:
        raise TransferFailed(
            f"the KV arena {where} is another one than announced (the owner restarted?)"
        )
    if (size, blocks) != (descriptor.size, descriptor.num_blocks):
        raise TransferFailed(f"the KV arena {where} contradicts its announced size")
    if fingerprint.decode("ascii", "replace") != layout.fingerprint():
        raise IncompatiblePeer(
            f"layout: {layout.fingerprint()} here, {fingerprint!r} in the KV arena {where}"
        )
