"""More work than fits: queues, preemption, refusal - never a stall, a crash or a wrong token.

Guards scenarios 18, 52, 53, 54, 55.
"""

from collections.abc import Iterator

import pytest

from diptych import Client, InvalidRequest, Overloaded
from tests.system.asking import GREEDY, answers, assert_golden, submit
from tests.system.conftest import GoldenCase
from tests.system.fleet import Fleet, deployment, serving

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

TINY_POOL = "26MiB"
"""36 blocks of 16 tokens in fp32: a few sequences fill it."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    tree = deployment(
        {"prefill": 1, "decode": 1},
        workers={"prefill": {"kv_memory": TINY_POOL}, "decode": {"kv_memory": TINY_POOL}},
        router={"split_threshold": 0, "max_queue": 24},
    )
    yield from serving(Fleet(tree))


def test_a_pool_that_is_far_too_small_gives_right_answers_late(
    fleet: Fleet, golden: list[GoldenCase]
) -> None:
    """Growth of running sequences outgrows the pool: preempt, recompute, finish."""
    cases = [c for c in golden if len(c.prompt_ids) <= 130]
    got = answers(fleet, cases, 16, max_tokens=24, **GREEDY)
    assert_golden(cases, got)
    with Client(fleet.client_endpoint) as client:
        fleet.wait_idle(client)


def test_a_request_that_can_never_fit_is_refused_by_name(
    fleet: Fleet, golden: list[GoldenCase]
) -> None:
    big = next(c for c in golden if len(c.prompt_ids) == 1024)
    with Client(fleet.client_endpoint) as client, pytest.raises(InvalidRequest) as caught:
        client.generate(list(big.prompt_ids), max_tokens=4, temperature=0.0, timeout=60.0)
    assert "36 blocks of 16 tokens" in str(caught.value), "the limit is named"


def test_a_burst_is_queued_or_told_to_come_back_and_workers_stay_healthy(
    fleet: Fleet, golden: list[GoldenCase]
) -> None:
    cases = [c for c in golden if len(c.prompt_ids) <= 34]
    with Client(fleet.client_endpoint, timeout=300.0) as client:
        burst = [submit(client, cases[i % len(cases)], max_tokens=4, **GREEDY) for i in range(120)]
        good, refused = 0, 0
        for i, future in enumerate(burst):
            try:
                assert cases[i % len(cases)].explain(list(future.result(240).token_ids)) is None
                good += 1
            except Overloaded as error:
                assert error.retry_after is not None
                assert error.retry_after > 0
                refused += 1
        assert good >= 24
        assert good + refused == 120
        assert refused > 0, "the queue has a bound"
        status = fleet.wait_idle(client)
        assert {w["health"] for w in status["workers"]} == {"ready"}
