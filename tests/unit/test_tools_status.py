"""The status screen fits a terminal of 80 columns, whatever the numbers."""

import io

import msgspec
from rich.console import Console

from shared.config import Deployment
from shared.ids import Incarnation, WorkerId
from shared.messages.fleet import (
    FleetStatus,
    OtherVersion,
    PairStatus,
    RouterCounters,
    WorkerCounters,
    WorkerLoad,
    WorkerStatus,
)
from shared.messages.hello import WIRE_VERSION
from tools.status import Snapshot, render
from tools.supervise.control import ProcessState

DEPLOYMENT = msgspec.convert(
    {"name": "t", "deployment_type": "split", "workers": {"prefill": {}, "decode": {}}}, Deployment
)
PID = 4194304


def worker(done: int) -> WorkerStatus:
    return WorkerStatus(
        worker=WorkerId("prefill-0"),
        role="prefill",
        health="draining",
        incarnation=Incarnation(1),
        pid=PID,
        age=0.0,
        load=WorkerLoad(waiting=256, running=64, blocks_total=100, blocks_active=100),
        counters=WorkerCounters(prompt_tokens=done, cached_tokens=done, output_tokens=done),
    )


def snapshot(at: float, done: int, counters: RouterCounters) -> Snapshot:
    states = {
        name: ProcessState(
            name=name, group=name, statename="RUNNING", pid=PID, exitstatus=0, start=0, now=1
        )
        for name in ("prefill-0", "decode-0", "router", "gateway")
    }
    fleet = FleetStatus(
        incarnation=Incarnation(1),
        uptime=1e6,
        queued=256,
        open_requests=1024,
        draining=False,
        workers=(worker(done),),
        counters=counters,
    )
    return Snapshot(at=at, states=states, fleet=fleet)


def screen(counters: RouterCounters, pairs: tuple[PairStatus, ...] = ()) -> str:
    console = Console(file=io.StringIO(), width=80)
    now, before = snapshot(1.0, 12345, counters), snapshot(0.0, 0, counters)
    assert now.fleet is not None
    reader = msgspec.structs.replace(worker(0), worker=WorkerId("decode-0"), pairs=pairs)
    fleet = msgspec.structs.replace(now.fleet, workers=(*now.fleet.workers, reader))
    now = msgspec.structs.replace(now, fleet=fleet) if pairs else now
    console.print(render(DEPLOYMENT, now, before))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_column_is_whole_at_80_columns() -> None:
    text = screen(RouterCounters(accepted=123456, finished=123456))
    assert "\u2026" not in text
    assert text.splitlines()[1].split()[-1] == "out/s"
    assert text.count("12345 ") + text.count("12345\n") == 3
    assert all(len(line.rstrip()) < 79 for line in text.splitlines())


def test_what_never_happened_is_left_out() -> None:
    assert "requests: 2 accepted, 1 finished\n" in screen(RouterCounters(accepted=2, finished=1))
    text = screen(RouterCounters(accepted=2, finished=1, failed=1, retries=3))
    assert "requests: 2 accepted, 1 finished, 1 failed, 3 retries\n" in text


def test_peers_of_another_release_are_told() -> None:
    """Guards a half-updated fleet of which only the router's log knows."""
    now, before = (snapshot(at, 0, RouterCounters(other_versions=3)) for at in (1.0, 0.0))
    assert now.fleet is not None
    fleet = msgspec.structs.replace(now.fleet, other_version=OtherVersion("[b]gateway", 2))
    console = Console(file=io.StringIO(), width=80)
    console.print(render(DEPLOYMENT, msgspec.structs.replace(now, fleet=fleet), before))
    assert isinstance(console.file, io.StringIO)
    text = " ".join(console.file.getvalue().split())
    assert "refused 3 times: peers of another release, the last one [b]gateway with wire" in text
    assert f"with wire version 2, not {WIRE_VERSION}" in text


def test_a_pair_tells_its_codec_and_the_bytes_it_saved_only_if_there_is_one() -> None:
    """Guards a lossy codec that nobody sees."""
    plain = PairStatus(source=WorkerId("prefill-0"), path="ipc", reason="self_test", codec="none")
    coded = PairStatus(
        source=WorkerId("prefill-1"),
        path="host",
        reason="other_host",
        codec="int8",
        codec_reason="configured",
        bytes=40_000_000,
        wire_bytes=20_600_000,
    )
    text = " ".join(screen(RouterCounters(), (plain, coded)).split())
    assert "40.0 MB, 20.6 MB as int8" in text
    assert text.count(" as ") == 1


def test_a_path_that_is_no_longer_used_is_told_apart() -> None:
    """Guards a pair that seems to use two paths at once."""
    former = PairStatus(
        source=WorkerId("prefill-0"), path="host", reason="cannot_map", transfers=3, former=True
    )
    now = PairStatus(source=WorkerId("prefill-0"), path="ipc", reason="self_test", transfers=1)
    none = PairStatus(source=WorkerId("prefill-0"), failed=2, former=True)
    text = " ".join(screen(RouterCounters(), (none, former, now)).split())
    assert "to decode-0: before a path was found, 0 hand-overs, 2 failed" in text
    assert "host (cannot_map), no longer, 3 hand-overs" in text
    assert "ipc (self_test), 1 hand-overs" in text


def test_a_pair_tells_why_it_is_pipelined_and_what_that_spares() -> None:
    """Guards a gate whose decision nobody can see or doubt."""
    pair = PairStatus(
        source=WorkerId("prefill-0"),
        path="ipc",
        transfers=10,
        visible_seconds=0.038,
        pipelined=8,
        pipelined_visible_seconds=0.024,
        pipeline_reason="faster",
    )
    text = " ".join(screen(RouterCounters(), (pair,)).split())
    assert "8 pipelined (faster: 3.0 ms, others 7.0)" in text
    one = msgspec.structs.replace(pair, transfers=8, pipeline_reason="configured")
    assert "8 pipelined (configured)" in " ".join(screen(RouterCounters(), (one,)).split())


def test_services_that_nobody_supervises_are_shown_by_what_the_fleet_says() -> None:
    """Guards a deployment whose services run by hand or on other machines."""
    console = Console(file=io.StringIO(), width=80)
    now = msgspec.structs.replace(snapshot(1.0, 0, RouterCounters()), states=None)
    console.print(render(DEPLOYMENT, now, now))
    console.print(render(DEPLOYMENT, msgspec.structs.replace(now, fleet=None), now))
    assert isinstance(console.file, io.StringIO)
    rows = [line.split()[:4] for line in console.file.getvalue().splitlines()]
    assert ["prefill-0", "prefill", "draining", str(PID)] in rows
    assert ["decode-0", "decode", "absent", "-"] in rows
    assert ["gateway", "gateway", "ready", "-"] in rows
    assert ["gateway", "gateway", "unknown", "-"] in rows


def test_a_pair_without_a_path_says_why() -> None:
    """Guards a refused pair that looks like one that has had no request yet."""
    text = "prefill-0 and decode-0 do not fit: block_size: 16 here, [4] there"
    pair = PairStatus(source=WorkerId("prefill-0"), problem=text)
    shown = " ".join(screen(RouterCounters(), (pair,)).split())
    assert f"KV prefill-0 to decode-0: no path: {text}, 0 hand-overs" in shown
