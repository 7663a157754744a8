"""``diptych bench serve``: load a gateway at several concurrency levels and report."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import httpx
import msgspec
import uvloop
from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shared.errors import ResourceMissing
from tools.bench.cpu import cpu_seconds, own_cpu_seconds
from tools.bench.load import Workload, run_load
from tools.bench.sse_client import Target
from tools.bench.summary import Cost, LevelSummary, summarise

_ASK_TIMEOUT = 10.0
_MIN_REQUESTS = 8
_ROUNDS = 4
_WARM_UP = 2


class Plan(Struct, frozen=True, kw_only=True):
    """What to measure. ``requests`` per level; None is four rounds of every client."""

    input_words: int
    output_tokens: int
    levels: tuple[int, ...]
    requests: int | None
    seed: int
    timeout: float

    def requests_at(self, concurrency: int) -> int:
        """Return how many requests a level sends."""
        return self.requests or max(_MIN_REQUESTS, _ROUNDS * concurrency)


class _Model(Struct, frozen=True):
    id: str


class _Models(Struct, frozen=True):
    data: list[_Model]


def served_model(url: str, api_key: str | None) -> str:
    """Return the first model of the server. Raises ``ResourceMissing`` if none answers."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        answer = httpx.get(
            f"{url.rstrip('/')}/v1/models", headers=headers, timeout=_ASK_TIMEOUT, trust_env=False
        )
        answer.raise_for_status()
        return msgspec.json.decode(answer.content, type=_Models).data[0].id
    except (httpx.HTTPError, msgspec.MsgspecError, IndexError) as error:
        raise ResourceMissing(
            f"no server answers at {url} ({error}); start one with `diptych up`, "
            "or let this command do it with --config FILE"
        ) from error


def measure(
    target: Target, model: str, plan: Plan, control: list[int], console: Console
) -> list[LevelSummary]:
    """Warm up, then run every level. Raises ``ResourceMissing`` if the warm-up fails."""
    with _bar(console) as progress:
        return uvloop.run(_measure(target, model, plan, control, progress))


async def _measure(
    target: Target, model: str, plan: Plan, control: list[int], progress: Progress
) -> list[LevelSummary]:
    warm_up = progress.add_task("warm-up", total=_WARM_UP)
    await _warm_up(
        target,
        _workload(model, plan, seed=plan.seed),
        functools.partial(progress.advance, warm_up),
    )
    summaries = []
    for number, concurrency in enumerate(plan.levels, 1):
        requests = plan.requests_at(concurrency)
        task = progress.add_task(f"{concurrency} at a time", total=requests)
        work = _workload(model, plan, seed=plan.seed + number)
        control_before, client_before = cpu_seconds(control), own_cpu_seconds()
        records = await run_load(
            target, work, concurrency, requests, functools.partial(progress.advance, task)
        )
        control_after = cpu_seconds(control)
        spent = None
        if control_before is not None and control_after is not None:
            spent = control_after - control_before
        cost = Cost(control=spent, client=own_cpu_seconds() - client_before)
        summaries.append(summarise(concurrency, records, cost))
    return summaries


async def _warm_up(target: Target, work: Workload, done: Callable[[], None]) -> None:
    records = await run_load(target, work, _WARM_UP, _WARM_UP, done)
    for record in records:
        if record.error is not None:
            raise ResourceMissing(f"the warm-up request failed: {record.error}")


def _workload(model: str, plan: Plan, *, seed: int) -> Workload:
    return Workload(
        model=model,
        input_words=plan.input_words,
        output_tokens=plan.output_tokens,
        seed=seed,
        timeout=plan.timeout,
    )


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield progress
