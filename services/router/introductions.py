"""Which sources of KV the workers that decode are told of, before a request needs them."""

from collections.abc import Iterable
from typing import Final

from services.router.records import Worker
from shared.messages.router_worker import KvPeer

PER_BEAT: Final = 64
"""Pairs of the whole fleet: no prefill worker is greeted by more readers at once."""


class Introductions:
    """Every pair is introduced once per life of either side, a bounded number with each beat."""

    def __init__(self) -> None:
        self._last = 0

    def joined(self, worker: Worker) -> None:
        """The worker said hello: readers are told of it, and it is told of all sources."""
        worker.introduced = 0
        self.returned(worker)

    def returned(self, worker: Worker) -> None:
        """The worker was away: readers are told of it again."""
        self._last += 1
        worker.number = self._last

    def next(self, workers: Iterable[Worker]) -> dict[bytes, tuple[KvPeer, ...]]:
        """Return whom each reader meets now; readers that meet nobody are left out."""
        here = [worker for worker in workers if worker.health != "lost"]
        sources = sorted((w for w in here if w.role == "prefill"), key=lambda w: w.number)
        told: dict[bytes, tuple[KvPeer, ...]] = {}
        left = PER_BEAT
        # Who waits longest comes first: sources that restart again and again use up each beat.
        for reader in sorted(here, key=lambda w: w.introduced):
            if not sources or not left:
                break
            if reader.role == "prefill" or reader.introduced >= sources[-1].number:
                continue
            new = [source for source in sources if source.number > reader.introduced][:left]
            left -= len(new)
            reader.introduced = new[-1].number
            told[reader.peer] = tuple(_peer(source) for source in new)
        return told


def _peer(source: Worker) -> KvPeer:
    hello = source.hello
    return KvPeer(worker=hello.worker, incarnation=hello.incarnation, endpoint=hello.kv_endpoint)
