"""TTFT must decompose: queue + prefill + transfer + first step, within 1 % (scenario 64)."""

import httpx
import pytest

from tests.system.conftest import GoldenCase
from tests.system.fleet import Fleet

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


@pytest.fixture(scope="session", params=["colocated", "split"])
def fleet(request: pytest.FixtureRequest) -> Fleet:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def test_the_phases_of_ttft_sum_up(fleet: Fleet, golden: list[GoldenCase]) -> None:
    model = httpx.get(f"{fleet.url}/v1/models").json()["data"][0]["id"]
    for case in golden[28:34]:
        body = {
            "model": model,
            "prompt": list(case.prompt_ids),
            "max_tokens": 4,
            "temperature": 0,
            "timeline": True,
        }
        answer = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=60).json()
        timeline = answer["choices"][0]["timeline"]
        phases = timeline["phases"]
        total = sum(phases[k] for k in ("queue", "prefill", "transfer", "first_step"))
        assert total == pytest.approx(timeline["ttft"], rel=0.01), timeline
        assert all(value >= 0 for value in phases.values()), timeline
        assert phases["prefill"] > 0
        if "prefill-0" in fleet.workers:
            assert timeline["split"] is True
            assert timeline["second_token"]["transfer"] >= 0
