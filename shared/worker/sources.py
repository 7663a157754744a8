"""The prefill workers this worker pulls from: connecting, greeting, losing them."""

from msgspec import Struct

from shared.errors import ErrorPayload
from shared.ids import TransferId
from shared.messages.prefill_decode import (
    FromDecode,
    OpenTransfer,
    PeerHello,
    PeerWelcome,
    RenewLeases,
)
from shared.worker.effects import CloseSource, ConnectSource, MapArena, ToSource
from shared.worker.events import SourceKey
from shared.worker.limits import WorkerIdentity, WorkerLimits
from shared.worker.outbox import Outbox
from shared.worker.paths import KNOWN_CODECS, CodecTerms, known_rule

_MAX_IDLE_SOURCES = 64


class Source(Struct):
    """A connected prefill worker; ``ready`` once it said welcome, so that transfers are opened.

    ``heard``: when it last said anything. ``settled``: its path has passed the self-test.
    """

    deadline: float
    renewed: float
    heard: float
    ready: bool = False
    settled: bool = False


class Sources:
    """One link per life of a prefill worker, kept while it lives."""

    def __init__(self, identity: WorkerIdentity, limits: WorkerLimits, outbox: Outbox) -> None:
        self._identity = identity
        self._limits = limits
        self._outbox = outbox
        self._known: dict[SourceKey, Source] = {}

    def __contains__(self, key: SourceKey) -> bool:
        return key in self._known

    def ready(self, key: SourceKey) -> bool:
        """Return whether transfers can be opened and copied."""
        source = self._known.get(key)
        return source is not None and source.ready

    def settle(self, key: SourceKey) -> None:
        """The path is known."""
        self._known[key].settled = True

    def settled(self, key: SourceKey) -> bool:
        """Return whether the path is known."""
        source = self._known.get(key)
        return source is not None and source.settled

    @property
    def unsettled(self) -> int:
        """How many are connected whose path is not known yet."""
        return sum(not source.settled for source in self._known.values())

    def former_lives(self, key: SourceKey) -> list[SourceKey]:
        """Return connected earlier incarnations of the same worker: they are dead."""
        return [k for k in self._known if k.worker == key.worker and k != key]

    def connect(self, key: SourceKey, endpoint: str, now: float, in_use: set[SourceKey]) -> None:
        """Connect and say hello, unless connected already."""
        if key in self._known:
            return
        for idle in [k for k in self._known if k not in in_use][:-_MAX_IDLE_SOURCES]:
            self.drop(idle)
        deadline = now + self._limits.handshake_timeout
        self._known[key] = Source(deadline=deadline, renewed=now, heard=now)
        self._outbox.add(ConnectSource(key, endpoint))
        self._hello(key)

    def heard(self, key: SourceKey, now: float) -> None:
        """The source said something."""
        source = self._known.get(key)
        if source is not None:
            source.heard = now

    def welcome(self, key: SourceKey, message: PeerWelcome) -> ErrorPayload | None:
        """Map the arena of the source, or say why it is not the one expected."""
        source = self._known[key]
        if (message.worker, message.incarnation) != (key.worker, key.incarnation):
            text = f"{key.worker} was restarted: its KV from before is gone"
            return ErrorPayload(code="transfer_failed", message=text, retryable=True)
        if not source.ready:
            source.ready = True
            codec = known_rule(message.codec)
            terms = CodecTerms("none", "unknown")
            if codec is not None:
                terms = CodecTerms(codec, message.codec_reason)
            self._outbox.add(
                MapArena(
                    source=key,
                    arena=message.arena,
                    host=message.host,
                    bulk=message.bulk,
                    path=message.path,
                    terms=terms,
                    nixl=message.nixl,
                )
            )
        return None

    def send(self, key: SourceKey, message: FromDecode) -> None:
        """Send if connected; a lost source needs no farewell."""
        if key in self._known:
            self._outbox.add(ToSource(key, message))

    def drop(self, key: SourceKey) -> None:
        """Close the link."""
        if self._known.pop(key, None) is not None:
            self._outbox.add(CloseSource(key))

    def late(self, now: float) -> list[SourceKey]:
        """Return the sources that did not answer hello in time."""
        return [k for k, s in self._known.items() if not s.ready and s.deadline <= now]

    def renew(
        self, key: SourceKey, needed: list[TransferId], unheard: list[OpenTransfer], now: float
    ) -> None:
        """Renew leases once per heartbeat, and ask again for what was never announced.

        A source that has said nothing since the time before may have forgotten this worker, after
        a partition, or for a late hello of its former life: it is greeted anew.
        """
        source = self._known[key]
        if not source.ready or now - source.renewed < self._limits.heartbeat:
            return
        if unheard and source.heard < source.renewed:
            self._hello(key)
        source.renewed = now
        if needed:
            self.send(key, RenewLeases(transfers=tuple(needed)))
        for subscription in unheard:
            self.send(key, subscription)

    def connected(self) -> list[SourceKey]:
        """Return all connected sources."""
        return list(self._known)

    def _hello(self, key: SourceKey) -> None:
        identity = self._identity
        self.send(
            key,
            PeerHello(
                worker=identity.worker,
                incarnation=identity.incarnation,
                host=identity.host,
                compatibility=identity.compatibility,
                path=identity.path,
                codec=identity.codec,
                codecs=KNOWN_CODECS,
            ),
        )
