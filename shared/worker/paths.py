"""Which way KV takes between two workers: agreed at hello, self-tested, never switched."""

from collections.abc import Sequence
from typing import Final, get_args

from msgspec import Struct

from shared.errors import DiptychError, TransferFailed
from shared.messages.fleet import CodecReason, CodecRule, KvPath, PathReason, PathRule
from shared.messages.prefill_decode import CudaDescriptor

KNOWN_PATHS: Final[tuple[PathRule, ...]] = get_args(PathRule)
_RULES: Final[tuple[CodecRule, ...]] = get_args(CodecRule)
KNOWN_CODECS: Final = tuple(rule for rule in _RULES if rule != "auto")
"""What this build decodes and encodes, as told at hello."""


_APART: Final[dict[PathReason, str]] = {
    "mixed_memory": "one side's KV is in a GPU's memory and the other's is not",
    "mig": "a GPU is a MIG slice, and CUDA shares no memory between processes there",
    "cannot_map": "the source's GPU exports no memory (its log says why)",
}


class Choice(Struct, frozen=True):
    """The path to try, and why; ``fallback``: the other one may be tried if it fails."""

    path: KvPath
    reason: PathReason
    fallback: bool = False


class CodecTerms(Struct, frozen=True):
    """How KV of a pair is encoded on the ``host`` path, and why so."""

    codec: CodecRule = "none"
    reason: CodecReason = "configured"


def agree(mine: PathRule, theirs: str) -> PathRule | None:
    """Return the rule both sides live with, None if they name two different paths.

    ``theirs`` may be of a later version: no side takes a path that it does not know.
    """
    if mine == theirs or theirs == "auto":
        return mine
    return next((rule for rule in KNOWN_PATHS if rule == theirs), None) if mine == "auto" else None


def memory_apart(mine: CudaDescriptor | None, theirs: CudaDescriptor | None) -> PathReason | None:
    """Return why neither side's memory can be mapped by the other even on one host, or None.

    None stands for a pool in the machine's memory.
    """
    if mine is None and theirs is None:
        return None
    if mine is None or theirs is None:
        return "mixed_memory"
    if mine.sliced or theirs.sliced:
        return "mig"
    return "cannot_map" if theirs.handle is None else None


def choose(
    rule: PathRule,
    *,
    same_host: bool,
    bulk: str | None,
    nixl: bool = False,
    apart: PathReason | None = None,
) -> Choice | DiptychError:
    """Return what to try for a source that may offer a ``bulk`` endpoint, or why nothing can.

    ``same_host`` is equality of ``HostId``: machine, boot and pid namespace, not address.
    ``nixl``: the library runs on both sides. ``apart``: see ``memory_apart``.
    """
    if rule == "nixl" and nixl:
        return Choice("nixl", "configured", fallback=bulk is not None)
    if rule == "ipc":
        if not same_host:
            return TransferFailed("`transfer.path: ipc` needs one host, and the workers are on two")
        if apart is not None:
            return TransferFailed(f"`transfer.path: ipc` does not work here: {_APART[apart]}")
        return Choice("ipc", "configured")
    if rule == "auto" and same_host and apart is None:
        return Choice("ipc", "self_test", fallback=bulk is not None)
    if bulk is None:
        return TransferFailed("the source offers no endpoint for `transfer.path: host`")
    reasons: dict[PathRule, PathReason] = {"host": "configured", "nixl": "nixl_missing"}
    return Choice("host", reasons.get(rule, apart if same_host and apart else "other_host"))


def agree_codec(mine: CodecRule, theirs: str, known: Sequence[str]) -> CodecTerms | None:
    """Return what both sides allow and know, None where they name two different codecs.

    ``known`` are the codecs of the other side, whose rule ``theirs`` may be of a later version.
    No side gets a loss it did not ask for: ``none`` beats everything, a name beats ``auto``.
    """
    if mine == theirs == "none":
        return CodecTerms()
    if "none" in (mine, theirs):
        return CodecTerms("none", "declined" if known else "unknown")
    if mine != theirs and "auto" not in (mine, theirs):
        return None
    codec = known_rule(theirs if mine == "auto" else mine)
    if codec == "auto":
        return CodecTerms("auto", "planned") if known else CodecTerms("none", "unknown")
    if codec is None or codec not in known:
        return CodecTerms("none", "unknown")
    return CodecTerms(codec, "configured")


def known_rule(name: str) -> CodecRule | None:
    """Return the rule of this name, None if it is of another version."""
    return next((rule for rule in _RULES if rule == name), None)
