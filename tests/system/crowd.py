"""Many short requests, some abandoned at any moment, and what the processes hold afterwards."""

import asyncio
import os
import random
import time
from collections import Counter

import msgspec
from msgspec import Struct

import diptych
from tests.system.fleet import Fleet
from tools.bench.sse_client import BrokenStream, SseClient, Target

CLIENTS = 32
_WORDS = ("time", "way", "day", "man", "thing", "world", "life", "hand", "part", "child", "eye")


class Holding(Struct, frozen=True, kw_only=True):
    """What one process holds; ``anonymous`` is its own memory in KiB, without mapped pools."""

    anonymous: int
    files: int
    threads: int


def holdings(fleet: Fleet) -> dict[str, Holding]:
    """Measure every process of the deployment."""
    return {name: _holding(process.pid) for name, process in fleet.processes.items()}


def _holding(pid: int) -> Holding:
    with open(f"/proc/{pid}/status") as file:
        status = dict(line.split(":", 1) for line in file)
    return Holding(
        anonymous=int(status["RssAnon"].split()[0]),
        files=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(status["Threads"]),
    )


def settled(fleet: Fleet, client: diptych.Client, files: dict[str, int]) -> dict[str, Holding]:
    """Wait until no work is left and connections are closed, and measure.

    A process that still has more than ``files`` descriptors after 30 s is measured as it is.
    """
    fleet.wait_idle(client)
    end = time.monotonic() + 30.0
    found = holdings(fleet)
    while time.monotonic() < end and any(found[name].files > most for name, most in files.items()):
        time.sleep(0.2)
        found = holdings(fleet)
    return found


async def crowd(
    fleet: Fleet, requests: int, seed: int, *, words: int = 150, leaving: float = 0.3
) -> Counter[str]:
    """Send ``requests`` over HTTP and the SDK, ``leaving`` of them abandoned; count how they end.

    Prompts have up to ``words`` words. Each client keeps its connection until it hangs up.
    """
    rng = random.Random(seed)
    left, ends = iter(range(requests)), Counter[str]()

    async def http(target: Target) -> None:
        client = SseClient(target)
        for _ in left:
            ends[await _over_http(client, rng, words, leaving)] += 1
        client.close()

    async def sdk() -> None:
        async with diptych.AsyncClient(fleet.client_endpoint) as client:
            for _ in left:
                ends[await _over_sdk(client, rng, words, leaving)] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(sdk() if number % 8 == 0 else http(Target.parse(fleet.url)))
    return ends


async def _over_http(client: SseClient, rng: random.Random, words: int, leaving: float) -> str:
    body = {
        "prompt": _prompt(rng, words),
        "max_tokens": rng.randint(1, 24),
        "seed": rng.randrange(1000),
        "stream": rng.random() < 0.7,
        "n": rng.choice((1, 1, 1, 2)),
    }
    hang_up = None
    if rng.random() < leaving:
        hang_up = asyncio.get_running_loop().call_later(rng.expovariate(4.0), client.close)
    try:
        path, data = "/v1/completions", msgspec.json.encode(body)
        reply = await client.post(path, data, lambda *_: None, timeout=300.0)
    except (BrokenStream, OSError):
        return "left" if hang_up is not None else "broken"
    finally:
        if hang_up is not None:
            hang_up.cancel()
    return str(reply.status)


async def _over_sdk(
    client: diptych.AsyncClient, rng: random.Random, words: int, leaving: float
) -> str:
    work = client.generate(
        _prompt(rng, words), max_tokens=rng.randint(1, 24), seed=rng.randrange(1000)
    )
    if rng.random() >= leaving:
        await work
        return "200"
    try:
        async with asyncio.timeout(rng.expovariate(4.0)):
            await work
    except TimeoutError:
        return "left"
    return "200"


def _prompt(rng: random.Random, words: int) -> str:
    """Some share what others began with."""
    shared = _WORDS * rng.choice((0, 0, words // 30))
    return " ".join([*shared, *rng.choices(_WORDS, k=rng.randint(4, words))])
