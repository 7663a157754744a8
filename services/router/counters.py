"""The router's own counters; monotonic since start."""

from collections import Counter

from msgspec import Struct, field

from shared.messages.fleet import OtherVersion, RouterCounters

_LONGEST_NAME = 64


class Counters(Struct, eq=False):
    """Mutable form of ``RouterCounters``. ``decisions`` has one key per reason string."""

    accepted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0
    retries: int = 0
    duplicates: int = 0
    late_messages: int = 0
    rejected_frames: int = 0
    violations: int = 0
    other_versions: int = 0
    tokens: int = 0
    decisions: Counter[str] = field(default_factory=Counter)
    other_version: OtherVersion | None = None

    def another_version(self, peer: str, wire_version: int) -> None:
        """A peer was refused because it speaks another wire version; the newest one is named."""
        self.other_versions += 1
        self.other_version = OtherVersion(peer[:_LONGEST_NAME], wire_version)

    def snapshot(self) -> RouterCounters:
        """Return the wire form."""
        return RouterCounters(
            accepted=self.accepted,
            finished=self.finished,
            cancelled=self.cancelled,
            failed=self.failed,
            rejected=self.rejected,
            retries=self.retries,
            duplicates=self.duplicates,
            late_messages=self.late_messages,
            rejected_frames=self.rejected_frames,
            violations=self.violations,
            other_versions=self.other_versions,
            tokens=self.tokens,
            decisions=dict(self.decisions),
        )
