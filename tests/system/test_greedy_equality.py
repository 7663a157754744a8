"""Split or not, chunked or not, alone or in a crowd: fp32 greedy output is the reference's.

Guards scenarios 32, 37: pages reused too early, and errors at prefix length == block size.
"""

import pytest

from diptych import Client
from tests.system.asking import GREEDY, answers, assert_golden
from tests.system.conftest import GoldenCase
from tests.system.fleet import Fleet

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


@pytest.fixture(scope="session", params=["colocated", "split", "split_2x2"])
def fleet(request: pytest.FixtureRequest) -> Fleet:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def test_every_prompt_alone_equals_the_reference(fleet: Fleet, golden: list[GoldenCase]) -> None:
    """The longest, half of all work, where prompts are not cut; the busy batches have them all."""
    longest = 2048 if len(fleet.workers) == 2 else 400
    chosen = [case for case in golden if len(case.prompt_ids) <= longest]
    got = answers(fleet, chosen, 1, max_tokens=3, **GREEDY)
    assert_golden(chosen, got)


def test_a_busy_batch_equals_the_reference(fleet: Fleet, golden: list[GoldenCase]) -> None:
    got = answers(fleet, golden, 20, max_tokens=16, **GREEDY)
    assert_golden(golden, got)


def test_a_second_round_from_the_prefix_cache_equals_it_too(
    fleet: Fleet, golden: list[GoldenCase]
) -> None:
    """And it is cached: all full blocks but the one that must be computed are reused."""
    chosen = golden[::4]
    answers(fleet, chosen, 10, max_tokens=2, **GREEDY)
    got = answers(fleet, chosen, 10, max_tokens=12, **GREEDY)
    assert_golden(chosen, got)
    for case, completion in zip(chosen, got, strict=True):
        length = len(case.prompt_ids)
        assert completion.usage.prompt_tokens == length
        if len(fleet.workers) <= 2:  # with two prefill workers the other one may be chosen
            assert completion.usage.cached_tokens == (length - 1) // 16 * 16, length


def test_all_pools_are_back_at_rest(fleet: Fleet) -> None:
    """Scenarios 24, 25: at idle nothing is leased, held or active."""
    with Client(fleet.client_endpoint) as client:
        status = fleet.wait_idle(client)
    for worker in status["workers"]:
        load = worker["load"]
        assert load["blocks_leased"] == load["blocks_active"] == 0, worker
        assert load["blocks_free"] + load["blocks_cached"] == load["blocks_total"]
