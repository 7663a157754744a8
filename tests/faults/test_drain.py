"""SIGTERM to any service under load: in-flight work ends or moves, clients see no error.

Guards scenarios 61, 62.
"""

import signal
from collections.abc import Iterator

import pytest

from diptych import Client
from tests.system.asking import GREEDY, assert_golden, submit
from tests.system.conftest import GoldenCase
from tests.system.fleet import Fleet, deployment, serving

# Services are stopped and started again: other children at the end than at the start.
pytestmark = [pytest.mark.faults, pytest.mark.timeout(300), pytest.mark.keeps("children")]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    yield from serving(
        Fleet(deployment({"prefill": 1, "decode": 2}, router={"split_threshold": 0}))
    )


@pytest.mark.parametrize("service", ["decode-0", "prefill-0", "router"])
def test_a_service_told_to_stop_costs_no_client_an_error(
    fleet: Fleet, golden: list[GoldenCase], service: str
) -> None:
    cases = [c for c in golden if len(c.prompt_ids) <= 200][:12]
    with Client(fleet.client_endpoint, timeout=240.0) as client:
        client.wait_ready()
        futures = [submit(client, case, max_tokens=24, **GREEDY) for case in cases]
        first = client.stream(list(cases[0].prompt_ids), max_tokens=24, **GREEDY)
        with first as stream:
            next(iter(stream))
            fleet.kill(service, signal.SIGTERM)
            assert fleet.processes[service].wait(60) == 0
        fleet.restart(service)
        assert_golden(cases, [f.result(240) for f in futures])
        fleet.wait_idle(client)
