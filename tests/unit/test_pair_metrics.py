"""What a pair's KV cost, from the copy job to the metrics page: by pair, never mixed up."""

import re

from services.gateway.fleet_metrics import fleet_text
from shared.ids import Incarnation, WorkerId
from shared.messages.fleet import (
    FleetStatus,
    PairStatus,
    RouterCounters,
    WorkerCounters,
    WorkerLoad,
    WorkerStatus,
)
from shared.worker.events import Copied, PathChosen, SourceKey
from shared.worker.pairs import Pairs

NEAR = SourceKey(WorkerId("prefill-0"), Incarnation(3))
FAR = SourceKey(WorkerId("prefill-1"), Incarnation(4))


def two_pairs() -> tuple[PairStatus, ...]:
    """Return the lines of a reader with a source on its host and one on another."""
    pairs = Pairs()
    pairs.chosen(PathChosen(NEAR, "ipc", "self_test"))
    pairs.chosen(PathChosen(FAR, "host", "other_host", "configured"))
    for job in range(3):
        pairs.copied(NEAR.worker, Copied(job, 100, 0.25))
    pairs.copied(FAR.worker, Copied(9, 1000, 2.0, 4, wire_bytes=520, codec="int8"))
    pairs.arrived(NEAR.worker, 0.0)
    pairs.arrived(FAR.worker, 0.5, tokens=9, pipelined=True)
    pairs.failed(FAR.worker)
    return pairs.snapshot()


def test_a_source_that_restarted_continues_its_line_with_its_new_path() -> None:
    """Guards counts that fall back to zero, and a path of the former life (3)."""
    pairs = Pairs()
    pairs.chosen(PathChosen(NEAR, "ipc", "self_test"))
    pairs.copied(NEAR.worker, Copied(1, 100, 0.25))
    again = SourceKey(NEAR.worker, Incarnation(8))
    pairs.chosen(PathChosen(again, "host", "cannot_map", "declined"))
    pairs.copied(NEAR.worker, Copied(2, 50, 0.25, wire_bytes=50))
    (line,) = pairs.snapshot()
    assert (line.path, line.reason, line.codec_reason) == ("host", "cannot_map", "declined")
    assert (line.bytes, line.wire_bytes, line.codec) == (150, 50, "none")


def test_every_pair_has_its_own_line_with_bytes_of_both_kinds() -> None:
    near, far = two_pairs()
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
    assert (near.failed, far.failed, near.chunks_again, far.chunks_again) == (0, 1, 0, 4)


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
    status = FleetStatus(
        incarnation=Incarnation(1),
        uptime=1.0,
        queued=0,
        open_requests=0,
        draining=False,
        workers=(worker,),
        counters=RouterCounters(),
    )
    page = fleet_text(status).decode()
    for name, near, far in (
        ("bytes", 300, 1000),
        ("wire_bytes", 0, 520),
        ("transfers", 1, 1),
        ("failed", 0, 1),
        ("chunks_again", 0, 4),
        ("visible_seconds", 0, 0.5),
        ("pipelined", 0, 1),
        ("pipelined_visible_seconds", 0, 0.5),
    ):
        found = dict(
            re.findall(rf'diptych_kv_{name}_total{{.*source="(prefill-\d)".*}} ([\d.]+)', page)
        )
        assert {k: float(v) for k, v in found.items()} == {"prefill-0": near, "prefill-1": far}
    assert 'source="prefill-0",worker="decode-0"' in page.replace("\n", "")
    assert 'diptych_kv_pipelining{reason="configured",source="prefill-1",worker="decode-0"}' in page
    assert 'path="ipc",reason="self_test"' in page and 'reason="other_host"' in page
