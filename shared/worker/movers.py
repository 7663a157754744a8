"""Brings KV from each source by the path that was chosen for it."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import zmq
from msgspec import Struct

from shared.config import SecuritySection
from shared.device.cuda_pool import CudaPool
from shared.device.cuda_stage import CudaLand
from shared.device.device import SharedKv
from shared.errors import DiptychError, ErrorPayload, IncompatiblePeer, TransferFailed
from shared.ids import HostId
from shared.messages.fleet import KvPath, PathReason
from shared.transport.bulk.faults import FaultyCopies
from shared.transport.bulk.fetches import Failed
from shared.transport.bulk.reader import (
    Fetched,
    FetchJob,
    HostReader,
    Opened,
    Outcome,
    ReaderLimits,
)
from shared.transport.bulk.source_link import Peer
from shared.transport.bulk.stage import InStage, in_memory
from shared.transport.security import security_for
from shared.worker.copier import Copier
from shared.worker.device_copier import DeviceCopier
from shared.worker.effects import Copy, MapArena
from shared.worker.events import Copied, CopyFailed, Event, PathChosen, SourceKey, SourceLost
from shared.worker.nixl_reader import NixlReader, Reads
from shared.worker.paths import Choice, CodecTerms, choose, memory_apart

log = logging.getLogger(__name__)


class _Route(Struct):
    """``path`` is None until the self-test is over; jobs wait until then."""

    effect: MapArena
    choice: Choice
    path: KvPath | None = None
    waiting: list[Copy] = []


class Extras(Struct, frozen=True):
    """What a deployment adds: harm to copies, and the library for ``nixl``."""

    faults: FaultyCopies | None = None
    nixl: Reads | None = None


NO_EXTRAS: Final = Extras()


class Movers:
    """Shared memory (``Copier``, ``DeviceCopier``) and sockets (``HostReader``), one interface.

    Every job is answered once by ``Copied`` or ``CopyFailed``; a source whose self-test fails
    on every path allowed is a ``SourceLost``.
    """

    def __init__(
        self,
        target: SharedKv,
        post: Callable[[Event], None],
        *,
        host: HostId,
        identity: bytes,
        security: SecuritySection,
        limits: ReaderLimits,
        extras: Extras = NO_EXTRAS,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._post = post
        self._host = host
        self._identity = identity
        self._security = security
        self._routes: dict[SourceKey, _Route] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(limits.fetch.sockets)
        self._cuda = target.descriptor().cuda
        self._layout = target.layout
        self._copier: Copier | DeviceCopier
        stage: InStage | None = None
        if isinstance(target, CudaPool):
            stage = CudaLand(target, limits.chunk_bytes)
            self._copier = DeviceCopier(
                *(target, self._from_copier),
                mapped=self._mapped,
                refused=self._refused,
                faults=extras.faults,
            )
        else:
            self._copier = Copier(
                in_memory(target), self._from_copier, mapped=self._mapped, faults=extras.faults
            )
        self._nixl: NixlReader | None = None
        if extras.nixl is not None:
            patience = limits.fetch.stall * limits.fetch.attempts
            self._nixl = NixlReader(
                *(extras.nixl, in_memory(target), self._from_copier),
                seconds=patience,
                met=self._met,
            )
        self._reader: HostReader[SourceKey] = HostReader(
            self._context, target, limits, self._from_reader_thread, stage
        )

    @property
    def rejected(self) -> int:
        """Malformed frames on the links for KV bytes."""
        return self._reader.rejected

    @property
    def spoiled(self) -> int:
        """Chunks that did not verify."""
        return self._reader.spoiled

    def same_host(self, effect: MapArena) -> bool:
        """Return whether the source's pid means anything here."""
        return effect.host == self._host

    def open(self, effect: MapArena) -> None:
        """Find the path to a source; answered by ``PathChosen`` or ``SourceLost``."""
        theirs, ours = effect.arena.dtype, self._layout.dtype
        if self._cuda is not None and theirs not in (None, ours):
            text = f"kv_dtype: {ours} here, {theirs} there, and on a GPU nothing converts KV"
            self._lost(effect.source, IncompatiblePeer(text).payload())
            return
        both = self._nixl is not None and effect.nixl is not None
        choice = choose(
            effect.path,
            same_host=self.same_host(effect),
            bulk=effect.bulk,
            nixl=both,
            apart=memory_apart(self._cuda, effect.arena.cuda),
        )
        if isinstance(choice, DiptychError):
            self._lost(effect.source, choice.payload())
            return
        route = self._routes[effect.source] = _Route(effect, choice, waiting=[])
        if choice.path == "ipc":
            self._copier.map_arena(effect.source, effect.arena)
        elif choice.path == "nixl" and self._nixl is not None and effect.nixl is not None:
            self._nixl.meet(effect.source, effect.arena, effect.nixl)
        else:
            self._connect(route)

    def close_source(self, source: SourceKey) -> None:
        """Drop mapping and link; jobs already given still get their answer."""
        route = self._routes.pop(source, None)
        if route is None:
            return
        for job in route.waiting:
            self._fail(job)
        self._copier.unmap(source)
        self._reader.drop(source)
        if self._nixl is not None:
            self._nixl.forget(source)

    def copy(self, job: Copy) -> None:
        """Bring blocks; answered by ``Copied`` or ``CopyFailed``."""
        route = self._routes.get(job.source)
        if route is None:
            self._fail(job)
        elif route.path is None:
            route.waiting.append(job)
        else:
            self._move(route.path, job)

    def close(self) -> None:
        """End both threads; open jobs are not answered."""
        self._copier.close()
        self._reader.close()
        if self._nixl is not None:
            self._nixl.close()
        self._context.term()

    def _move(self, path: KvPath, job: Copy) -> None:
        if path == "ipc":
            self._copier.copy(job)
            return
        if path == "nixl":
            assert self._nixl is not None
            self._nixl.copy(job)
            return
        self._reader.fetch(
            FetchJob(
                job=job.job,
                source=job.source,
                first_layer=job.first_layer,
                end_layer=job.end_layer,
                source_blocks=job.source_blocks,
                generations=job.generations,
                target_blocks=job.target_blocks,
                tokens=job.tokens,
            )
        )

    def _connect(self, route: _Route) -> None:
        source, endpoint = route.effect.source, route.effect.bulk
        assert endpoint is not None
        try:
            security = security_for(endpoint, self._security, "connect")
        except DiptychError as error:
            self._lost(source, error.payload())
            return
        peer = Peer(
            endpoint=endpoint,
            arena=route.effect.arena.arena_id,
            identity=self._identity,
            security=security,
            codec=self._terms(route).codec,
            layout=self._layout.with_dtype(route.effect.arena.dtype),
        )
        self._reader.open(source, peer)

    def _terms(self, route: _Route) -> CodecTerms:
        """Return how KV comes by ``host``; what a GPU holds is never encoded."""
        terms = route.effect.terms
        if self._cuda is None or terms.codec == "none":
            return terms
        return CodecTerms("none", "declined")

    def _decided(self, source: SourceKey, path: KvPath, reason: PathReason) -> None:
        route = self._routes.get(source)
        if route is None:
            return
        route.path = path
        terms = self._terms(route) if path == "host" else CodecTerms("none", "shared_memory")
        log.info(
            "KV of %s comes by %s (%s), codec %s (%s)",
            *(source.worker, path, reason, terms.codec, terms.reason),
        )
        self._post(PathChosen(source, path, reason, terms.reason))
        for job in route.waiting:
            self._move(path, job)
        route.waiting.clear()

    def _mapped(self, source: SourceKey) -> None:
        route = self._routes.get(source)
        if route is not None:
            self._decided(source, "ipc", route.choice.reason)

    def _met(self, source: SourceKey) -> None:
        route = self._routes.get(source)
        if route is not None:
            self._decided(source, "nixl", route.choice.reason)

    def _from_copier(self, event: Event) -> None:
        if isinstance(event, SourceLost):
            route = self._routes.get(event.source)
            nixl = route is not None and route.choice.path == "nixl"
            self._refused(event.source, "nixl_failed" if nixl else "cannot_map", event.error)
            return
        self._post(event)

    def _refused(self, source: SourceKey, reason: PathReason, error: ErrorPayload) -> None:
        """Fall back from a path whose self-test failed, where that is allowed and can help."""
        route = self._routes.get(source)
        if route is None or not route.choice.fallback or not error.retryable:
            self._post(SourceLost(source, error))
            return
        log.warning("%s: %s; KV comes by host", reason, error.message)
        route.choice = Choice("host", reason)
        self._connect(route)

    def _from_reader_thread(self, outcome: Outcome[SourceKey]) -> None:
        self._loop.call_soon_threadsafe(self._from_reader, outcome)

    def _from_reader(self, outcome: Outcome[SourceKey]) -> None:
        match outcome:
            case Fetched():
                self._post(
                    Copied(
                        outcome.job,
                        outcome.bytes,
                        outcome.seconds,
                        outcome.again,
                        outcome.wire,
                        outcome.codec,
                        outcome.spoiled,
                    )
                )
            case Failed():
                self._post(
                    CopyFailed(
                        outcome.job,
                        outcome.error,
                        outcome.reused,
                        outcome.again,
                        outcome.spoiled,
                    )
                )
            case Opened():
                route = self._routes.get(outcome.source)
                if outcome.error is not None:
                    self._post(SourceLost(outcome.source, outcome.error))
                elif route is not None:
                    self._decided(outcome.source, "host", route.choice.reason)

    def _fail(self, job: Copy) -> None:
        error = TransferFailed(f"the KV of {job.source.worker} is not reachable").payload()
        self._loop.call_soon(self._post, CopyFailed(job.job, error))

    def _lost(self, source: SourceKey, error: ErrorPayload) -> None:
        self._loop.call_soon(self._post, SourceLost(source, error))
