"""Kill -9 of any process but the gateway: every stream ends complete and unchanged.

Guards scenarios 1-6, 11: decode needs no restart after prefill died and the other way round,
old handles are refused, nothing waits forever, nothing stays stuck after churn.
"""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from diptych import Client, Completion
from tests.system.asking import GREEDY, SAMPLED, assert_golden, submit
from tests.system.conftest import GoldenCase
from tests.system.fleet import Fleet, deployment

# The keeper starts killed processes again: other children at the end than at the start.
pytestmark = [pytest.mark.faults, pytest.mark.timeout(600), pytest.mark.keeps("children")]

KILLS = 20
"""Each costs the start of a process; `make soak` does a hundred."""
STREAMS = 16


def kept_fleet() -> Fleet:
    """Return a pair of workers whose requests survive any number of losses."""
    return Fleet(
        deployment(
            {"prefill": 1, "decode": 1},
            router={"split_threshold": 0, "max_retries": 50},
        )
    )


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = kept_fleet()
    try:
        fleet.start()
        fleet.keep()
        yield fleet
    finally:
        fleet.stop()
        fleet.remove()


class Load:
    """Keeps ``STREAMS`` golden requests open and collects what comes back."""

    def __init__(self, client: Client, cases: list[GoldenCase]) -> None:
        self._client = client
        self._cases = cases
        self._next = 0
        self._lock = threading.Lock()
        self.open: dict[Future[Completion], GoldenCase] = {}
        self.done: list[tuple[GoldenCase, Completion]] = []

    def top_up(self) -> None:
        """Collect the finished, start new ones in their place."""
        for future in [f for f in self.open if f.done()]:
            self.done.append((self.open.pop(future), future.result()))
        while len(self.open) < STREAMS:
            case = self._cases[self._next % len(self._cases)]
            self._next += 1
            self.open[submit(self._client, case, max_tokens=24, **GREEDY)] = case

    def finish(self) -> None:
        """Wait for the rest."""
        for future, case in self.open.items():
            self.done.append((case, future.result(240)))
        self.open.clear()


def kill_at_random(fleet: Fleet, golden: list[GoldenCase], kills: int) -> None:
    """Kill one process after the other under load, and compare every stream."""
    rng = random.Random(2026)
    cases = [c for c in golden if len(c.prompt_ids) <= 330]
    rng.shuffle(cases)
    pause = threading.Event()
    with Client(fleet.client_endpoint, timeout=300.0) as client:
        load = Load(client, cases)
        for _ in range(kills):
            load.top_up()
            pause.wait(rng.uniform(0.2, 2.0))
            victim = rng.choice(["prefill-0", "decode-0", "router"])
            fleet.kill(victim)
        load.finish()
        assert_golden([case for case, _ in load.done], [c for _, c in load.done])
        assert len(load.done) >= STREAMS
        fleet.wait_ready(fleet.names)
        fleet.wait_idle(client)


def test_random_kills_leave_every_stream_complete_and_equal(
    fleet: Fleet, golden: list[GoldenCase]
) -> None:
    kill_at_random(fleet, golden, KILLS)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "router", "gateway"])
def test_a_seeded_sampled_stream_goes_on_as_the_same_stream(
    fleet: Fleet, golden: list[GoldenCase], victim: str
) -> None:
    """Randomness is a function of (seed, position): the resumed stream is the very same.

    With the gateway as victim the SDK re-submits: no duplicate, no missing token.
    """
    case = golden[12]
    with Client(fleet.client_endpoint, timeout=300.0, reconnect_timeout=120.0) as client:
        fleet.wait_ready(fleet.names)
        client.wait_ready()
        params = {"max_tokens": 48, "seed": 11, **SAMPLED}
        undisturbed = client.generate(list(case.prompt_ids), **params)
        with client.stream(list(case.prompt_ids), **params) as stream:  # type: ignore[arg-type]
            text, tokens = "", list[int]()
            for chunk in stream:
                text += chunk.text
                tokens += chunk.token_ids
                if len(tokens) == 10:
                    fleet.kill(victim)
        assert tuple(tokens) == undisturbed.token_ids
        assert text == undisturbed.text


def test_decode_serves_on_while_prefill_is_gone(fleet: Fleet, golden: list[GoldenCase]) -> None:
    """Scenarios 1, 2, 16: without a prefill worker the explicit policy `local` serves."""
    case = golden[3]
    fleet.wait_ready(fleet.names)
    with Client(fleet.client_endpoint, timeout=120.0) as client:
        decode = fleet.processes["decode-0"].pid
        fleet.kill("prefill-0")
        got = submit(client, case, max_tokens=12, **GREEDY).result(120)
        assert_golden([case], [got])
        assert fleet.processes["decode-0"].pid == decode
        status = fleet.wait_idle(client)
        assert sum(status["counters"]["decisions"].values()) > 0
