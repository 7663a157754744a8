"""The section ``faults`` of the deployment file: harm done to KV on purpose. Delays in seconds."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.errors import BadConfig

_Number = Annotated[int, Meta(ge=0)]
_Times = Annotated[int, Meta(ge=1)]


class ChunkFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Harm to KV chunks that ``worker`` (default: each) sends on the ``host`` path.

    Strikes the ``chunk``-th it sends, from 0, once, or any with ``probability``; at most
    ``times`` times. ``delay`` holds the chunk back, ``stall`` everything from then on.
    """

    kind: Literal["delay", "drop", "duplicate", "reorder", "corrupt", "truncate", "stall", "kill"]
    chunk: _Number | None = None
    probability: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    delay: float = 0.1
    times: _Times | None = None
    worker: str | None = None


class CopyFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Harm to copies that the reader ``worker`` (default: each) makes on the ``ipc`` path.

    Strikes as ``ChunkFault`` does. ``delay`` waits between the copy and its check, ``fail``
    fails the job, ``stale`` claims that a block was used anew, ``kill`` ends the reader's
    process, ``kill_source`` that of the prefill worker, both after copying and before the check.
    """

    kind: Literal["delay", "fail", "stale", "kill", "kill_source"]
    copy: _Number | None = None
    probability: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    delay: float = 0.1
    times: _Times | None = None
    worker: str | None = None


class FaultsSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults injected on purpose, to see what they do. ``seed`` makes them repeatable."""

    seed: int = 0
    chunks: tuple[ChunkFault, ...] = ()
    copies: tuple[CopyFault, ...] = ()


def check_faults(faults: FaultsSection, source: str) -> None:
    """Check what types cannot say. Raises ``BadConfig`` naming the keys."""
    for key, what, numbers in (
        ("chunks", "chunk", [(f.chunk, f.probability) for f in faults.chunks]),
        ("copies", "copy", [(f.copy, f.probability) for f in faults.copies]),
    ):
        for index, (number, probability) in enumerate(numbers):
            if (number is None) is (probability is None):
                raise BadConfig(
                    f"{source}: a fault needs either `{what}` or `probability` "
                    f"- at `$.faults.{key}[{index}]`"
                )
