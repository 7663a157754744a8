"""Clients that leave at any moment: blocks come back, nobody else's output changes.

Guards scenarios 19, 21, 22, 23, 27, 28, 38.
"""

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from diptych import Client
from tests.system.asking import GREEDY, answers, assert_golden, submit
from tests.system.conftest import GoldenCase
from tests.system.crowd import crowd, settled
from tests.system.fleet import Fleet, deployment, serving

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    tree = deployment(
        {"prefill": 1, "decode": 1},
        router={"split_threshold": 0},
        workers={"prefill": {"max_batch_tokens": 64}},
    )
    yield from serving(Fleet(tree))


def test_cancels_at_every_moment_leave_others_untouched_and_no_block_behind(
    fleet: Fleet, golden: list[GoldenCase]
) -> None:
    """Shared prefixes, cancels from 1 ms to 1.5 s after the start, four rounds."""
    rng = random.Random(5)
    pause = threading.Event()
    kept = golden[0:40:8]
    with Client(fleet.client_endpoint, timeout=300.0) as client:
        for _ in range(4):
            staying = [submit(client, case, max_tokens=16, **GREEDY) for case in kept]
            leaving = [
                submit(client, rng.choice(golden), max_tokens=200, **GREEDY) for _ in range(24)
            ]
            rng.shuffle(leaving)
            for future in leaving:
                pause.wait(rng.choice([0.001, 0.015, 0.05, 0.1]))
                future.cancel()
            assert_golden(kept, [f.result(240) for f in staying])
        status = fleet.wait_idle(client)
        assert status["open_requests"] == 0
        assert status["counters"]["cancelled"] > 0
    probe = golden[5]
    assert_golden([probe], answers(fleet, [probe], 1, max_tokens=24, **GREEDY))


def test_an_http_client_that_hangs_up_stops_the_work_in_every_process(
    fleet: Fleet, golden: list[GoldenCase]
) -> None:
    """Scenario 28: during prefill (large prompt) and during decode, streaming and not."""
    long_prompt = list(golden[35].prompt_ids)
    body = {"model": "x", "prompt": long_prompt, "max_tokens": 900, "ignore_eos": True}
    body["model"] = httpx.get(f"{fleet.url}/v1/models").json()["data"][0]["id"]
    with Client(fleet.client_endpoint) as client:
        before = client.status()["counters"]["cancelled"]  # type: ignore[index]
        ask_and_leave(fleet, client, json.dumps(body).encode())
        with httpx.stream(
            "POST", f"{fleet.url}/v1/completions", json=body | {"stream": True}, timeout=60
        ) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            assert next(line for line in lines if line).startswith("data: ")
        start = time.monotonic()
        status = fleet.wait_idle(client)
        assert status["counters"]["cancelled"] >= before + 2
        assert time.monotonic() - start < 30, "900 tokens would have taken longer"


def ask_and_leave(fleet: Fleet, client: Client, body: bytes) -> None:
    """Ask, and hang up as soon as the router has the request."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", fleet.port), timeout=30) as caller:
        caller.sendall(head.encode() + body)
        end = time.monotonic() + 30
        while not client.status()["open_requests"]:
            assert time.monotonic() < end, "the request does not arrive"


def test_a_crowd_of_which_a_third_leaves_holds_nothing_afterwards(fleet: Fleet) -> None:
    """Descriptors, threads or blocks that stay with every tenth request end a server in a day."""
    with Client(fleet.client_endpoint) as client:
        asyncio.run(crowd(fleet, 40, 1, words=20))
        before = settled(fleet, client, {})
        ends = asyncio.run(crowd(fleet, 80, 2, words=20))
        assert set(ends) <= {"200", "left"} and ends["200"], ends
        after = settled(fleet, client, {name: held.files for name, held in before.items()})
        for name, held in after.items():
            assert held.files <= before[name].files, name
            assert held.threads <= before[name].threads, name
        for worker in fleet.wait_idle(client)["workers"]:
            load = worker["load"]
            assert load["blocks_free"] + load["blocks_cached"] == load["blocks_total"]


def test_a_bad_request_leaves_nothing_allocated(fleet: Fleet) -> None:
    """Scenario 20: what the gateway refuses never reaches a worker."""
    with Client(fleet.client_endpoint) as client:
        before = fleet.wait_idle(client)["counters"]["accepted"]
        model = httpx.get(f"{fleet.url}/v1/models").json()["data"][0]["id"]
        for path, body in (
            ("completions", {"model": "nope", "prompt": "x"}),
            ("completions", {"model": model, "prompt": []}),
            ("completions", {"model": model, "prompt": "x", "temperature": -1}),
            ("chat/completions", {"model": model, "messages": [{"role": "who"}]}),
        ):
            answer = httpx.post(f"{fleet.url}/v1/{path}", json=body, timeout=10)
            assert 400 <= answer.status_code < 500
            assert answer.json()["error"]["message"]
        assert fleet.wait_idle(client)["counters"]["accepted"] == before
