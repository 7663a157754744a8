"""`faults:` does what it says, and nothing else: else tests that use it prove nothing."""

import os

import pytest

from shared.fault_rules import ChunkFault, CopyFault, FaultsSection
from shared.messages.bulk import Chunk
from shared.transport.bulk.faults import FaultyCopies, FaultyLink, Parcel
from shared.units import Seconds


def parcel(number: int) -> Parcel:
    header = Chunk(job=1, attempt=1, index=number, size=8, checksum=0)
    return Parcel(b"peer", header, [memoryview(bytes(4)), memoryview(bytes(4))])


def pass_all(*faults: ChunkFault, count: int = 4, **changes: object) -> list[tuple[int, int]]:
    """Return (index, changed bits or missing bytes) of what comes out, in order."""
    link = FaultyLink(FaultsSection(chunks=faults, **changes), "prefill-0")  # type: ignore[arg-type]
    out: list[Parcel] = []
    for number in range(count):
        out += link.due(float(number))
        out += link.give(parcel(number), float(number))
    out += link.due(1e9)
    return [(p.header.index, harm(p)) for p in out]


def harm(item: Parcel) -> int:
    content = b"".join(item.frames)
    return 8 - len(content) + int.from_bytes(content, "little").bit_count()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("drop", [(0, 0), (2, 0), (3, 0)]),
        ("duplicate", [(0, 0), (1, 0), (1, 0), (2, 0), (3, 0)]),
        ("reorder", [(0, 0), (2, 0), (1, 0), (3, 0)]),
        ("corrupt", [(0, 0), (1, 1), (2, 0), (3, 0)]),
        ("truncate", [(0, 0), (1, 2), (2, 0), (3, 0)]),
        ("delay", [(0, 0), (2, 0), (1, 0), (3, 0)]),
        ("stall", [(0, 0), (1, 0), (2, 0), (3, 0)]),
    ],
)
def test_each_kind_harms_the_chunk_named(kind: str, expected: list[tuple[int, int]]) -> None:
    fault = ChunkFault(kind=kind, chunk=1, delay=Seconds(1.5))  # type: ignore[arg-type]
    assert pass_all(fault) == expected


def test_kill_strikes_once_the_chunk_is_reached() -> None:
    killed: list[bool] = []
    section = FaultsSection(chunks=(ChunkFault(kind="kill", chunk=2),))
    link = FaultyLink(section, "prefill-0", kill=lambda: killed.append(True))
    for number in range(3):
        assert not killed
        link.give(parcel(number), 0.0)
    assert killed == [True]


def harm_copies(*faults: CopyFault, count: int = 3) -> tuple[list[str | None], list[int]]:
    """Return what is done to each of ``count`` copies, and who was killed."""
    killed: list[int] = []
    copies = FaultyCopies(FaultsSection(copies=faults), "decode-0", kill=killed.append)
    return [copies.after_copy(99) for _ in range(count)], killed


@pytest.mark.parametrize(
    ("kind", "harm", "killed"),
    [
        ("delay", None, []),
        ("fail", "fail", []),
        ("stale", "stale", []),
        ("kill", None, [os.getpid()]),
        ("kill_source", None, [99]),
    ],
)
def test_each_kind_harms_the_copy_named(kind: str, harm: str | None, killed: list[int]) -> None:
    fault = CopyFault(kind=kind, copy=1, delay=0.001)  # type: ignore[arg-type]
    assert harm_copies(fault) == ([None, harm, None], killed)


def test_copies_of_other_readers_are_left_alone() -> None:
    other = CopyFault(kind="kill", probability=1.0, worker="decode-1")
    twice = CopyFault(kind="fail", probability=1.0, times=2)
    assert harm_copies(other, twice) == (["fail", "fail", None], [])


def test_times_worker_and_seed_are_heeded() -> None:
    any_chunk = ChunkFault(kind="drop", probability=0.5)
    assert pass_all(any_chunk, count=50, seed=3) == pass_all(any_chunk, count=50, seed=3)
    assert 5 < len(pass_all(any_chunk, count=50)) < 45
    always = ChunkFault(kind="drop", probability=1.0, times=2)
    assert pass_all(always) == [(2, 0), (3, 0)]
    other = ChunkFault(kind="drop", probability=1.0, worker="prefill-1")
    assert len(pass_all(other)) == 4
