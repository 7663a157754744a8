"""Garbage on every socket and in every HTTP body: refused, counted, nothing dies.

Guards scenario 67 and the list "bad input -> answer".
"""

import json
import random
from collections.abc import Iterator

import httpx
import pytest
import zmq

from diptych import Client
from tests.system.asking import GREEDY, answers, assert_golden
from tests.system.conftest import GoldenCase
from tests.system.fleet import Fleet, deployment, serving

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    yield from serving(
        Fleet(deployment({"prefill": 1, "decode": 1}, router={"split_threshold": 0}))
    )


def garbage(rng: random.Random) -> list[bytes]:
    """Return one message: noise, half-valid msgpack, wrong tags, deep nesting, many frames."""
    choice = rng.randrange(6)
    if choice == 0:
        return [rng.randbytes(rng.randrange(2000))]
    if choice == 1:
        return [b"\x81\xa4type\xa5hello" + rng.randbytes(rng.randrange(40))]
    if choice == 2:
        return [b"\x91" * 3000]
    if choice == 3:
        return [b"", rng.randbytes(10), b"x"]
    if choice == 4:
        return [b"\x82\xa4type\xa6tokens\xa5items\xdd\xff\xff\xff\xff"]
    return [b"\x81\xa4type\xa8generate"]


def test_fuzzed_frames_on_every_socket_kill_nothing(fleet: Fleet, golden: list[GoldenCase]) -> None:
    rng = random.Random(67)
    sockets = ["router-gateways", "router-workers", "client", "kv-prefill-0", "kv-decode-0"]
    context = zmq.Context()
    try:
        for name in sockets:
            path = fleet.home / "run" / f"{name}.sock"
            assert path.exists(), sorted(p.name for p in path.parent.iterdir())
            for number in range(3):
                socket = context.socket(zmq.DEALER)
                socket.setsockopt(zmq.ROUTING_ID, b"fuzz#%d" % number)
                socket.setsockopt(zmq.LINGER, 500)
                socket.setsockopt(zmq.SNDTIMEO, 2000)
                socket.connect(f"ipc://{path}")
                for _ in range(100):
                    socket.send_multipart(garbage(rng))
                socket.close()
    finally:
        context.destroy(linger=500)
    probe = golden[:6]
    assert_golden(probe, answers(fleet, probe, 6, max_tokens=8, **GREEDY))
    assert all(p.poll() is None for p in fleet.processes.values())
    with Client(fleet.client_endpoint) as client:
        status = fleet.wait_idle(client)
    assert status["counters"]["rejected_frames"] > 0
    assert sum(w["counters"]["rejected_frames"] for w in status["workers"]) > 0


BAD_BODIES = [
    ({"prompt": "x", "temperature": -0.1}, "temperature"),
    ({"prompt": "x", "top_p": 1.5}, "top_p"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "max_tokens": -3}, "max_tokens"),
    ({"prompt": "x", "max_tokens": "many"}, "max_tokens"),
    ({"prompt": "x", "frequency_penalty": 9}, "frequency_penalty"),
    ({"prompt": "x", "logit_bias": {"nope": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"prompt": "x", "stop": 7}, "stop"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, 99_999_999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [5] * 2048}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": "x", "min_p": 2}, "min_p"),
    ({"prompt": "x", "logprobs": 1000}, "logprobs"),
]


@pytest.mark.parametrize(("body", "param"), BAD_BODIES)
def test_bad_values_are_4xx_with_the_fields_name(
    fleet: Fleet, body: dict[str, object], param: str
) -> None:
    model = httpx.get(f"{fleet.url}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(f"{fleet.url}/v1/completions", json={"model": model} | body, timeout=10)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe{}", 400),
        (b'{"model": "\xff"}', 400),
        (b"[]", 400),
        (b'{"model": "m", "prompt": "x", "temperature": NaN}', 400),
        (b'{"prompt": "' + b"a" * (10 << 20) + b'"}', 413),
    ],
)
def test_broken_bodies_are_refused(fleet: Fleet, content: bytes, status: int) -> None:
    answer = httpx.post(f"{fleet.url}/v1/completions", content=content, timeout=20)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_an_invalid_json_schema_is_refused(fleet: Fleet) -> None:
    model = httpx.get(f"{fleet.url}/v1/models").json()["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
        },
    }
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=20)
    assert answer.status_code == 400, answer.text
    assert "response_format" in json.dumps(answer.json()["error"])


def test_unknown_models_and_paths_are_404(fleet: Fleet) -> None:
    body = {"model": "gpt-17", "prompt": "x"}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=10)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert httpx.get(f"{fleet.url}/v1/nothing", timeout=10).status_code == 404
