"""Which way KV takes between two workers: agreed at hello, self-tested, never switched."""

from msgspec import Struct

from shared.errors import DiptychError, TransferFailed
from shared.messages.fleet import KvPath, PathReason, PathRule


class Choice(Struct, frozen=True):
    """The path to try, and why; ``fallback``: the other one may be tried if it fails."""

    path: KvPath
    reason: PathReason
    fallback: bool = False


def agree(mine: PathRule, theirs: PathRule) -> PathRule | None:
    """Return the rule both sides live with, None if one says ``ipc`` and the other ``host``."""
    if mine == theirs or theirs == "auto":
        return mine
    return theirs if mine == "auto" else None


def choose(rule: PathRule, *, same_host: bool, bulk: str | None) -> Choice | DiptychError:
    """Return what to try for a source that may offer a ``bulk`` endpoint, or why nothing can.

    ``same_host`` is equality of ``HostId``: machine, boot and pid namespace, not address.
    """
    if rule == "ipc":
        if same_host:
            return Choice("ipc", "configured")
        return TransferFailed("`transfer.path: ipc` needs one host, and the workers are on two")
    if rule == "auto" and same_host:
        return Choice("ipc", "self_test", fallback=bulk is not None)
    if bulk is None:
        return TransferFailed("the source offers no endpoint for `transfer.path: host`")
    return Choice("host", "configured" if rule == "host" else "other_host")
