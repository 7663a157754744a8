"""What a pair's KV cost, from the copy job to the metrics page: by pair, never mixed up."""

import re

import msgspec

from services.gateway.fleet_metrics import fleet_text
from shared.errors import TransferFailed
from shared.ids import Incarnation, WorkerId
from shared.messages.fleet import (
    FleetStatus,
    PairStatus,
    PathReason,
    ReaderStatus,
    RouterCounters,
    WorkerCounters,
    WorkerLoad,
    WorkerStatus,
)
from shared.worker.events import Copied, CopyFailed, PathChosen, SourceKey
from shared.worker.pairs import Pairs

NEAR = SourceKey(WorkerId("prefill-0"), Incarnation(3))
BEFORE = SourceKey(NEAR.worker, Incarnation(2))
FAR = SourceKey(WorkerId("prefill-1"), Incarnation(4))


def two_pairs() -> tuple[PairStatus, ...]:
    """Return the lines of a reader with a source on its host and one on another.

    The pool of the near one could not be mapped at first.
    """
    pairs = Pairs()
    pairs.chosen(PathChosen(BEFORE, "host", "cannot_map", "declined"))
    pairs.copied(BEFORE, Copied(0, 70, 0.5, wire_bytes=70))
    pairs.chosen(PathChosen(NEAR, "ipc", "self_test"))
    pairs.chosen(PathChosen(FAR, "host", "other_host", "configured"))
    for job in range(3):
        pairs.copied(NEAR, Copied(job, 100, 0.25))
    pairs.copied(FAR, Copied(9, 1000, 2.0, 4, wire_bytes=520, codec="int8", spoiled=3))
    pairs.copied(FAR, CopyFailed(10, TransferFailed("x").payload(), 2, 1, 1))
    pairs.arrived(NEAR, 0.0)
    pairs.arrived(FAR, 0.5, tokens=9, pipelined=True)
    pairs.failed(FAR)
    return pairs.snapshot()


def test_what_came_by_one_path_is_never_counted_under_another() -> None:
    """Guards bytes of shared memory that show as a network's once the path is another one (3)."""
    pairs = Pairs()
    pairs.chosen(PathChosen(NEAR, "ipc", "self_test"))
    pairs.copied(NEAR, Copied(1, 100, 0.25))
    again = SourceKey(NEAR.worker, Incarnation(8))
    pairs.chosen(PathChosen(again, "host", "cannot_map", "declined"))
    pairs.copied(again, Copied(2, 50, 0.25, wire_bytes=50))
    pairs.copied(NEAR, Copied(3, 7, 0.25))  # answered late: of the former life
    former, line = pairs.snapshot()
    assert (former.path, former.bytes, former.wire_bytes, former.former) == ("ipc", 107, 0, True)
    assert (line.path, line.reason, line.codec_reason) == ("host", "cannot_map", "declined")
    assert (line.bytes, line.wire_bytes, line.codec, line.former) == (50, 50, "none", False)


def test_a_source_that_restarted_with_its_path_continues_its_line() -> None:
    """Guards counts that fall back to zero, and a path that comes back under a new line (3)."""
    pairs = Pairs()
    for life, path in ((1, "ipc"), (2, "host"), (3, "ipc")):
        source = SourceKey(NEAR.worker, Incarnation(life))
        reason: PathReason = "self_test" if path == "ipc" else "cannot_map"
        pairs.chosen(PathChosen(source, "ipc" if path == "ipc" else "host", reason))
        pairs.copied(source, Copied(life, 100, 0.25))
    mapped, other = pairs.snapshot()
    assert (mapped.path, mapped.bytes, mapped.chosen, mapped.former) == ("ipc", 200, 2, False)
    assert (other.path, other.bytes, other.chosen, other.former) == ("host", 100, 1, True)


def test_what_fails_before_a_path_is_found_is_no_path_s() -> None:
    """Guards failures that nobody counts, or that a path has to answer for."""
    pairs = Pairs()
    pairs.failed(NEAR)
    pairs.chosen(PathChosen(NEAR, "ipc", "self_test"))
    none, line = pairs.snapshot()
    assert (none.path, none.reason, none.failed, none.former) == (None, None, 1, True)
    assert (line.path, line.failed, line.chosen) == ("ipc", 0, 1)


def test_every_pair_has_its_own_line_with_bytes_of_both_kinds() -> None:
    before, near, far = two_pairs()
    assert (before.path, before.bytes, before.wire_bytes) == ("host", 70, 70)
    assert (near.source, near.path, near.reason) == (NEAR.worker, "ipc", "self_test")
    assert (near.bytes, near.wire_bytes, near.codec, near.codec_reason) == (
        *(300, 0, "none"),
        "shared_memory",
    )
    assert (far.source, far.path, far.reason) == (FAR.worker, "host", "other_host")
    assert (far.bytes, far.wire_bytes, far.codec, far.codec_reason) == (
        *(1000, 520, "int8"),
        "configured",
    )
    assert (near.failed, far.failed, near.chunks_again, far.chunks_again) == (0, 1, 0, 5)
    assert (near.chunks_spoiled, far.chunks_spoiled, far.generation_mismatches) == (0, 4, 2)


def test_the_metrics_page_tells_the_pairs_apart() -> None:
    """Guards a slow or failing link that hides in the sum over all links (64, 65)."""
    worker = WorkerStatus(
        worker=WorkerId("decode-0"),
        role="decode",
        health="ready",
        incarnation=Incarnation(1),
        pid=1,
        age=0.0,
        load=WorkerLoad(),
        counters=WorkerCounters(),
        pairs=two_pairs(),
    )
    source = msgspec.structs.replace(
        worker,
        worker=FAR.worker,
        role="prefill",
        pairs=(),
        readers=(ReaderStatus(reader=worker.worker, leases_expired=6),),
    )
    status = FleetStatus(
        incarnation=Incarnation(1),
        uptime=1.0,
        queued=0,
        open_requests=0,
        draining=False,
        workers=(worker, source),
        counters=RouterCounters(),
    )
    page = fleet_text(status).decode()
    without = "\n".join(line for line in page.splitlines() if "cannot_map" not in line)
    for name, near, far in (
        ("bytes", 300, 1000),
        ("wire_bytes", 0, 520),
        ("transfers", 1, 1),
        ("failed", 0, 1),
        ("chunks_again", 0, 5),
        ("chunks_spoiled", 0, 4),
        ("generation_mismatches", 0, 2),
        ("visible_seconds", 0, 0.5),
        ("pipelined", 0, 1),
        ("pipelined_visible_seconds", 0, 0.5),
    ):
        found = dict(
            re.findall(rf'diptych_kv_{name}_total{{.*source="(prefill-\d)".*}} ([\d.]+)', without)
        )
        assert {k: float(v) for k, v in found.items()} == {"prefill-0": near, "prefill-1": far}
    assert 'source="prefill-0",worker="decode-0"' in page.replace("\n", "")
    assert 'diptych_kv_pipelining{reason="configured",source="prefill-1",worker="decode-0"}' in page
    series = re.findall(r"(?m)^(diptych_\S+) ", page)
    assert len(series) == len(set(series)), "a scrape with a series twice is refused as a whole"
    assert 'path="ipc",reason="self_test"' in page and 'reason="other_host"' in page
    labels = 'path="host",reason="cannot_map",source="prefill-0",worker="decode-0"'
    assert f"diptych_kv_bytes_total{{{labels}}} 70.0" in page
    (fallback,) = re.findall(r"(?m)^diptych_kv_fallbacks_total.*$", page)
    assert fallback == f"diptych_kv_fallbacks_total{{{labels}}} 1.0"
    expired = 'diptych_kv_leases_expired_total{source="prefill-1",worker="decode-0"} 6.0'
    assert expired in page
