"""The decode workers that read from this worker: admitted only if they fit exactly."""

from shared.errors import ErrorPayload
from shared.ids import WorkerId
from shared.messages.hello import UnreadHello
from shared.messages.prefill_decode import (
    AbortTransfer,
    Acknowledge,
    FromDecode,
    OpenTransfer,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    RenewLeases,
)
from shared.worker.effects import Note, ToReader
from shared.worker.handover_source import HandoverSource
from shared.worker.limits import Tally, WorkerIdentity
from shared.worker.outbox import Outbox
from shared.worker.paths import KNOWN_PATHS, CodecTerms, agree, agree_codec

_MAX_READERS = 1024


class Readers:
    """Routing id -> worker; of each worker the newest life only."""

    def __init__(
        self, identity: WorkerIdentity, source: HandoverSource, outbox: Outbox, tally: Tally
    ) -> None:
        self._identity = identity
        self._source = source
        self._outbox = outbox
        self._tally = tally
        self._workers: dict[bytes, WorkerId] = {}

    def said(self, peer: bytes, message: FromDecode | UnreadHello, now: float) -> None:
        """Take a message in; what fits no peer or no transfer is counted as late."""
        if isinstance(message, PeerHello):
            self._hello(peer, message)
            return
        if isinstance(message, UnreadHello):
            self._refuse(peer, self._unlike(message.worker, [message.difference()]))
            return
        reader = self._workers.get(peer)
        if reader is None or not self._heed(peer, reader, message, now):
            self._tally.late_messages += 1

    def lost(self, peer: bytes) -> None:
        """Forget a routing id and end what was held for it."""
        self._workers.pop(peer, None)
        self._source.reader_lost(peer)

    def _hello(self, peer: bytes, message: PeerHello) -> None:
        error = self._misfit(peer, message)
        if error is not None:
            self._refuse(peer, error)
            return
        for former in [p for p, w in self._workers.items() if w == message.worker and p != peer]:
            self.lost(former)
        self._workers[peer] = message.worker
        terms = agree_codec(self._identity.codec, message.codec, message.codecs) or CodecTerms()
        welcome = PeerWelcome(
            worker=self._identity.worker,
            incarnation=self._identity.incarnation,
            arena=self._identity.arena,
            host=self._identity.host,
            bulk=self._identity.bulk_endpoint,
            path=agree(self._identity.path, message.path) or "auto",
            codec=terms.codec,
            codec_reason=terms.reason,
            nixl=self._identity.nixl,
        )
        self._outbox.add(ToReader(peer, welcome))

    def _refuse(self, peer: bytes, error: ErrorPayload) -> None:
        self._outbox.add(ToReader(peer, PeerRefused(error=error)))
        self._outbox.add(Note(f"refused as a reader: {error.code}: {error.message}"))

    def _heed(self, peer: bytes, reader: WorkerId, message: FromDecode, now: float) -> bool:
        match message:
            case OpenTransfer():
                self._source.subscribe(peer, reader, message, now)
                return True
            case Acknowledge():
                return self._source.acknowledge(peer, message.transfer)
            case AbortTransfer():
                return self._source.abort(peer, reader, message.transfer, now)
            case RenewLeases():
                return all([self._source.renew(peer, t, now) for t in message.transfers])
            case PeerHello():
                return False

    def _misfit(self, peer: bytes, message: PeerHello) -> ErrorPayload | None:
        mine = self._identity
        differences = mine.compatibility.differences(message.compatibility)
        if mine.compatibility.wire_version != message.compatibility.wire_version:
            return self._unlike(message.worker, differences)
        path = agree(mine.path, message.path)
        if path is None:
            unknown = "" if message.path in KNOWN_PATHS else ", which is not known here"
            differences.append(f"transfer.path: {mine.path} here, {message.path} there{unknown}")
        elif message.host != mine.host and (path == "ipc" or mine.bulk_endpoint is None):
            differences.append(
                f"host: {mine.host!r} here, {message.host!r} there, and `transfer.path: ipc` "
                "needs one host"
            )
        if path != "ipc" and agree_codec(mine.codec, message.codec, message.codecs) is None:
            differences.append(f"transfer.codec: {mine.codec} here, {message.codec} there")
        if differences:
            return self._unlike(message.worker, differences)
        if peer not in self._workers and len(self._workers) >= _MAX_READERS:
            text = f"{mine.worker} has {_MAX_READERS} readers already"
            return ErrorPayload(code="overloaded", message=text, retryable=True)
        return None

    def _unlike(self, reader: str, differences: list[str]) -> ErrorPayload:
        text = f"{self._identity.worker} and {reader} do not fit: " + "; ".join(differences)
        return ErrorPayload(code="incompatible_peer", message=text)
