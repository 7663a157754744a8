"""The optional library NIXL (``pip install .[nixl]``) behind the few calls that we need of it.

It reads a peer's memory by address, over whatever UCX finds: shared memory, RDMA, TCP. It knows
neither keys nor encryption.
"""

import importlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shared.errors import DiptychError, ResourceMissing, TransferFailed
from shared.kv.arena import KvArena
from shared.messages.prefill_decode import NixlDescriptor

log = logging.getLogger(__name__)

_POLL: Final = 0.0001
_MAX_ABANDONED: Final = 8


class Piece(Struct, frozen=True):
    """``size`` bytes at a peer's address, and where in the staging buffer they go."""

    address: int
    at: int
    size: int


class Hung(TransferFailed):
    """A read did not end in time: its staging buffer may still be written to."""


def load_library() -> ModuleType:
    """Return NIXL's Python module.

    Raises:
        ResourceMissing: it is not installed, or its native part does not load.
    """
    try:
        module = importlib.import_module("nixl._api")
    except (ImportError, OSError) as error:
        raise ResourceMissing(f"NIXL cannot be used: {error}") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it speaks on standard output
    return module


class Staging:
    """Memory that reads land in before anything is known to be right."""

    def __init__(self, agent: Any, size: int) -> None:  # noqa: ANN401
        self.memory: NDArray[np.uint8] = np.zeros(size, dtype=np.uint8)
        self.address = int(self.memory.ctypes.data)
        self.registration = agent.register_memory([(self.address, size, 0, "")], "DRAM")


class NixlEnd:
    """One agent with this worker's pool registered, for peers to read, and one staging buffer.

    Made in the loop's thread, then used by one thread only; the library's own thread serves peers.

    Raises:
        ResourceMissing: no library, or it does not start here.
    """

    def __init__(self, name: str, arena: KvArena, staging: int) -> None:
        library = load_library()
        with _calling(ResourceMissing, "does not start"):
            config = library.nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
            self._agent = library.nixl_agent(name, config)
            size = arena.descriptor().size
            self._pool = self._agent.register_memory([(arena.address, size, 0, "")], "DRAM")
            self._staging = Staging(self._agent, staging)
            metadata = self._agent.get_agent_metadata()
        self.descriptor = NixlDescriptor(agent=name, metadata=metadata, address=arena.address)
        self._abandoned: list[tuple[object, Staging]] = []
        log.warning("KV is offered by NIXL, which neither encrypts nor checks keys")

    @property
    def staging(self) -> NDArray[np.uint8]:
        """Where the last read landed."""
        return self._staging.memory

    def meet(self, peer: NixlDescriptor) -> None:
        """Learn how to reach a peer. Raises ``TransferFailed``."""
        with _calling(TransferFailed, f"does not know {peer.agent}"):
            self._agent.add_remote_agent(peer.metadata)

    def forget(self, peer: NixlDescriptor) -> None:
        """Drop what is known of a peer."""
        with _tolerating(f"had forgotten {peer.agent}"):
            self._agent.remove_remote_agent(peer.agent)

    def read(self, peer: NixlDescriptor, pieces: Sequence[Piece], seconds: float) -> None:
        """Read all pieces into ``staging``.

        Raises:
            TransferFailed: the peer is gone, or the library says no.
            Hung: not done after ``seconds``. ``staging`` is another buffer from now on, so that
                what may still arrive hits nothing.
        """
        self._reap()
        agent, start = self._agent, self._staging.address
        ours = [(start + piece.at, piece.size, 0) for piece in pieces]
        theirs = [(piece.address, piece.size, 0) for piece in pieces]
        with _calling(TransferFailed, f"cannot read from {peer.agent}"):
            local = agent.get_xfer_descs(ours, "DRAM")
            remote = agent.get_xfer_descs(theirs, "DRAM")
            handle = agent.initialize_xfer("READ", local, remote, peer.agent)
        try:
            state = self._run(handle, seconds)
        except TransferFailed:
            self._release(handle)
            raise
        if state == "PROC":
            self._abandoned.append((handle, self._staging))
            self._staging = Staging(agent, self._staging.memory.size)
            raise Hung(f"{peer.agent} was not read in {seconds:g} s")
        self._release(handle)
        if state != "DONE":
            raise TransferFailed(f"NIXL cannot read from {peer.agent}: {state}")

    def close(self) -> None:
        """Take the pool back; peers cannot read it any more."""
        with _tolerating("does not let go of memory"):
            for registration in (self._pool, self._staging.registration):
                self._agent.deregister_memory(registration)
        del self._agent

    def _run(self, handle: object, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        with _calling(TransferFailed, "stopped a read"):
            state = str(self._agent.transfer(handle))
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(_POLL)
                state = str(self._agent.check_xfer_state(handle))
        return state

    def _reap(self) -> None:
        """Let go of reads that hung and are over by now.

        Raises:
            TransferFailed: too many hang still.
        """
        for handle, staging in list(self._abandoned):
            state = "over"
            with _tolerating("stopped a read that hung"):
                state = str(self._agent.check_xfer_state(handle))
            if state != "PROC":
                self._release(handle)
                self._abandoned.remove((handle, staging))
        if len(self._abandoned) >= _MAX_ABANDONED:
            raise TransferFailed(f"{len(self._abandoned)} reads by NIXL hang")

    def _release(self, handle: object) -> None:
        with _tolerating("does not let go of a read"):
            self._agent.release_xfer_handle(handle)


@contextmanager
def _calling(kind: type[DiptychError], what: str) -> Iterator[None]:
    """Turn the library's errors, which have no base of their own, into ours."""
    try:
        yield
    except Exception as error:
        raise kind(f"NIXL {what}: {error}") from error


@contextmanager
def _tolerating(what: str) -> Iterator[None]:
    try:
        with _calling(TransferFailed, what):
            yield
    except TransferFailed as error:
        log.info("%s", error.message)
