"""The real model with KV over sockets: the reference's tokens, on a good and on a bad network.

Where that is allowed the good network lies between two hosts, prefill on the far one.
"""

import re
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from diptych import Client
from shared.errors import ResourceMissing
from tests.system.asking import GREEDY, answers, assert_golden
from tests.system.conftest import GoldenCase
from tests.system.far_fleet import FarFleet
from tests.system.fleet import PATIENT, Fleet, deployment, serving
from tests.transport.two_hosts import cabled
from tools.slow_link.hosts import Hosts

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

KINDS = ("drop", "duplicate", "reorder", "corrupt", "truncate", "delay")
BAD = {"seed": 5, "chunks": [{"kind": kind, "probability": 0.01} for kind in KINDS]}


PLACE = Hosts("dtp-s", "eth0", "10.213.8.1", "10.213.8.2")


def on_two_hosts(tree: dict[str, Any], stack: ExitStack) -> Fleet:
    """Return a deployment on two hosts as long as ``stack`` lasts, or on one without the rights."""
    try:
        return FarFleet(tree, stack.enter_context(cabled(PLACE)))
    except ResourceMissing:
        return Fleet(tree)


@pytest.fixture(scope="module", params=[None, BAD], ids=["good", "bad"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """1P1D that may not use shared memory, with small chunks and a small window."""
    transfer = {"path": "host", "chunk_size": "64KiB", "window": 4, "stall_timeout": "500ms"}
    changes: dict[str, Any] = {} if request.param is None else {"faults": request.param}
    tree = deployment(
        {"prefill": 1, "decode": 1},
        workers={"prefill": {"max_batch_tokens": 96}},
        router=PATIENT | {"split_threshold": 0},
        transfer=transfer,
        **changes,
    )
    with ExitStack() as stack:
        yield from serving(on_two_hosts(tree, stack) if request.param is None else Fleet(tree))


def assert_metrics(fleet: Fleet, told: dict[str, Any]) -> None:
    """The live page has the pair's figures of ``told``, under the labels that say the path.

    Not that visible seconds are more than none: where pages come while the prompt is computed,
    the last may be there before the news that the prefill is over, for every single hand-over.
    """
    page = urllib.request.urlopen(f"{fleet.url}/metrics", timeout=10).read().decode()
    labels = 'path="host",reason="configured",source="prefill-0",worker="decode-0"'
    lines = re.findall(r"(?m)^diptych_kv_(\w+)_total\{(.*)\} ([\d.e+]+)$", page)
    pair = {name: float(value) for name, those, value in lines if those == labels}
    for name in ("transfers", "bytes", "wire_bytes", "seconds", "visible_seconds", "failed"):
        assert pair[name] >= told[name], name
    assert pair["wire_bytes"] > 0 and pair["seconds"] > 0 and pair["failed"] == 0
    assert {those for name, those, _ in lines if name == "bytes"} == {labels}
    assert not [those for name, those, _ in lines if name in ("fallbacks", "leases_expired")]


def test_the_path_is_known_before_any_request(fleet: Fleet) -> None:
    """Guards a first request that waits for hello and self-test, and a fallback nobody sees."""
    with Client(fleet.client_endpoint) as client:
        (pair,) = fleet.wait_paths(client)
        assert client.status()["counters"]["accepted"] == 0
    assert (pair["source"], pair["path"], pair["reason"]) == ("prefill-0", "host", "configured")
    assert (pair["chosen"], pair["transfers"], pair["failed"]) == (1, 0, 0)
    page = urllib.request.urlopen(f"{fleet.url}/metrics", timeout=10).read().decode()
    labels = 'path="host",reason="configured",source="prefill-0",worker="decode-0"'
    assert f"diptych_kv_transfers_total{{{labels}}} 0.0" in page


def test_a_busy_batch_over_sockets_equals_the_reference(
    fleet: Fleet, golden: list[GoldenCase]
) -> None:
    """Guards split = unsplit for the path between machines (32, 35, 40, 41)."""
    chosen = golden[::4]
    assert_golden(chosen, answers(fleet, chosen, 8, max_tokens=10, **GREEDY))
    with Client(fleet.client_endpoint) as client:
        status = fleet.wait_idle(client)
    decode = next(w for w in status["workers"] if w["role"] == "decode")
    (pair,) = decode["pairs"]
    assert (pair["path"], pair["reason"]) == ("host", "configured")
    assert pair["transfers"] >= len(chosen) and pair["bytes"] > 0
    assert_metrics(fleet, pair)
    for worker in status["workers"]:
        load = worker["load"]
        assert load["blocks_free"] + load["blocks_cached"] == load["blocks_total"]


@pytest.mark.parametrize("fleet", [None], ids=["good"], indirect=True)
def test_an_http_client_is_served_across_two_hosts(fleet: Fleet, golden: list[GoldenCase]) -> None:
    """Guards a deployment that works on one machine only: real services, keys, two networks."""
    if not isinstance(fleet, FarFleet):
        pytest.skip("no network namespace, which needs root: the tests above were on one host")
    case = golden[6]
    body = {"prompt": list(case.prompt_ids), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    body |= {"model": httpx.get(f"{fleet.url}/v1/models").json()["data"][0]["id"], "logprobs": 0}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    with Client(fleet.client_endpoint) as client:
        tokens = client.generate(list(case.prompt_ids), max_tokens=8, **GREEDY)
        status = fleet.wait_idle(client)
    assert_golden([case], [tokens])
    assert answer.json()["choices"][0]["text"] == tokens.text
    assert status["counters"]["decisions"] == {"split": status["counters"]["accepted"]}
