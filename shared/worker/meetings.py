"""Prefill workers that are met before a request needs their KV, a few at a time."""

from collections.abc import Iterable
from typing import Final

from shared.ids import WorkerId
from shared.messages.router_worker import KvPeer
from shared.worker.events import SourceKey

_MAX_WAITING: Final = 1024
_AT_ONCE: Final = 4


class Meetings:
    """Of each worker the newest life that was told of and is not met yet, the oldest first."""

    def __init__(self) -> None:
        self._waiting: dict[WorkerId, KvPeer] = {}

    def told(self, peers: Iterable[KvPeer]) -> None:
        """The router says where KV may come from."""
        for peer in peers:
            self._waiting.pop(peer.worker, None)
            self._waiting[peer.worker] = peer
        while len(self._waiting) > _MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def met(self, worker: WorkerId) -> None:
        """A request was faster: its source is connected, and is no earlier life."""
        self._waiting.pop(worker, None)

    def next(self, unsettled: int) -> list[tuple[SourceKey, str]]:
        """Return whom to greet now, and where, while so many paths are not settled."""
        names = list(self._waiting)[: max(0, _AT_ONCE - unsettled)]
        peers = [self._waiting.pop(name) for name in names]
        return [(SourceKey(p.worker, p.incarnation), p.endpoint) for p in peers]
