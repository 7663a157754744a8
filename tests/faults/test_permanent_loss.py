"""A prefill worker whose KV never arrives: others do its work, and without others it is said so."""

from collections.abc import Iterator

import pytest

from diptych import Client, DiptychError
from tests.system.asking import GREEDY, assert_golden, submit
from tests.system.conftest import GoldenCase
from tests.system.fleet import PATIENT, Fleet, deployment

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

THRESHOLD = 100
"""Shorter prompts are computed where they are decoded: no KV travels."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """2P1D over sockets, where every chunk that prefill-0 sends is dropped."""
    tree = deployment(
        {"prefill": 2, "decode": 1},
        router=PATIENT | {"split_threshold": THRESHOLD, "max_retries": 2},
        transfer={"path": "host", "stall_timeout": "200ms"},
        faults={"chunks": [{"kind": "drop", "probability": 1.0, "worker": "prefill-0"}]},
    )
    fleet = Fleet(tree)
    try:
        yield fleet.start()
    finally:
        fleet.stop()
        fleet.remove()


def test_a_link_that_drops_everything_costs_retries_and_then_a_named_error(
    fleet: Fleet, golden: list[GoldenCase]
) -> None:
    """Guards hangs, wrong tokens and errors of others where one link is dead for good (14, 24)."""
    long = [case for case in golden if THRESHOLD < len(case.prompt_ids) < 400]
    short = [case for case in golden if len(case.prompt_ids) < THRESHOLD]
    served, doomed = long[1::3], long[0]
    with Client(fleet.client_endpoint, timeout=120.0) as client:
        work = [submit(client, case, max_tokens=6, **GREEDY) for case in served]
        assert_golden(served, [future.result(120) for future in work])
        status = fleet.wait_idle(client)
        (decode,) = [w for w in status["workers"] if w["role"] == "decode"]
        pairs = {pair["source"]: pair for pair in decode["pairs"]}
        lost = pairs["prefill-0"]["failed"]
        assert lost > 0 and pairs["prefill-0"]["transfers"] == pairs["prefill-0"]["bytes"] == 0
        assert pairs["prefill-1"]["transfers"] > 0 and pairs["prefill-1"]["failed"] == 0
        assert status["counters"]["retries"] >= lost and status["counters"]["failed"] == 0

        fleet.kill("prefill-1")
        hopeless = submit(client, doomed, max_tokens=40, **GREEDY)
        beside = [submit(client, case, max_tokens=6, **GREEDY) for case in short[:4]]
        assert_golden(short[:4], [future.result(120) for future in beside])
        with pytest.raises(DiptychError, match="the KV did not arrive: ") as caught:
            hopeless.result(120)
        assert caught.value.code == "transfer_failed" and caught.value.retryable
    lines = [line for line in fleet.log("router", 400).splitlines() if " WARNING request " in line]
    assert any("prefill-0: transfer_failed: " in line for line in lines), lines
    assert any(line.endswith("failed 3 times in a row (router.max_retries)") for line in lines)
