"""Closed-loop load: a fixed number of clients, each sending its next request at once."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator

import msgspec
from msgspec import Struct

from tools.bench.records import Record, Recorder
from tools.bench.sse_client import BrokenStream, SseClient, Target

_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education"
)


class Workload(Struct, frozen=True, kw_only=True):
    """What each request asks for. ``input_words`` words make about as many tokens."""

    model: str
    input_words: int
    output_tokens: int
    seed: int
    timeout: float


def bodies(work: Workload) -> Iterator[bytes]:
    """Yield request bodies without end; no two share a prefix, all ask for a full output."""
    rng = random.Random(work.seed)
    vocabulary = _WORDS.split()
    while True:
        words = rng.choices(vocabulary, k=work.input_words)
        yield msgspec.json.encode(
            {
                "model": work.model,
                "prompt": " ".join(words),
                "max_tokens": work.output_tokens,
                "min_tokens": work.output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "timeline": True,
            }
        )


async def run_load(
    target: Target, work: Workload, concurrency: int, requests: int, done: Callable[[], None]
) -> list[Record]:
    """Send ``requests`` requests, ``concurrency`` at a time; ``done`` is called after each."""
    source = bodies(work)
    left = iter(range(requests))
    records: list[Record] = []

    async def one_client() -> None:
        client = SseClient(target)
        try:
            for _ in left:
                records.append(await one_request(client, next(source), work.timeout))
                done()
        finally:
            client.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, requests)):
            group.create_task(one_client())
    return records


async def one_request(client: SseClient, body: bytes, timeout: float) -> Record:
    """Send one completion request and record its stream; errors are part of the record."""
    recorder = Recorder(time.monotonic())
    problem = None
    try:
        reply = await client.post("/v1/completions", body, recorder.feed, timeout=timeout)
        if reply.status != 200:
            problem = f"HTTP {reply.status}: {reply.body[:300].decode(errors='replace')}"
    except TimeoutError:
        problem = f"no answer within {timeout:.0f} s"
    except (OSError, BrokenStream) as error:
        problem = str(error)
    return recorder.close(time.monotonic(), problem)
