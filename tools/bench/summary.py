"""From records to numbers."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from tools.bench.records import Record, Timeline

PERCENTILES = (50, 90, 99)


class Spread(Struct, frozen=True, kw_only=True):
    """Percentiles of a quantity in milliseconds, and how many values there were."""

    p50: float
    p90: float
    p99: float
    mean: float
    count: int


class PhaseSpreads(Struct, frozen=True, kw_only=True):
    """Where the time goes, from the servers' own timelines (milliseconds).

    ``queue + prefill + transfer`` is the gateway's TTFT. ``hand_over`` is first token sampled
    -> decode's first own token, minus one decode step; split requests only.
    """

    queue: Spread | None
    prefill: Spread | None
    transfer: Spread | None
    kv_transfer: Spread | None
    first_step: Spread | None
    decode_step: Spread | None
    hand_over: Spread | None


class LevelSummary(Struct, frozen=True, kw_only=True):
    """One concurrency level. ``control_cpu_us`` is router + gateway CPU per output token."""

    concurrency: int
    requests: int
    failed: int
    seconds: float
    prompt_tokens: float
    output_tokens: int
    output_rate: float
    request_rate: float
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    latency: Spread | None
    phases: PhaseSpreads
    split_share: float
    retries: int
    control_cpu_us: float | None
    client_cpu_share: float
    errors: list[str]


def spread(seconds: Sequence[float]) -> Spread | None:
    """Return percentiles in milliseconds, None of nothing."""
    if not seconds:
        return None
    values = 1e3 * np.asarray(seconds)
    p50, p90, p99 = np.percentile(values, PERCENTILES)
    return Spread(
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        mean=float(values.mean()),
        count=len(values),
    )


class Cost(Struct, frozen=True, kw_only=True):
    """CPU seconds spent during a level; ``control`` None where the processes are unknown."""

    control: float | None
    client: float


def summarise(concurrency: int, records: list[Record], cost: Cost) -> LevelSummary:
    """Reduce one level's records."""
    good = [record for record in records if record.error is None]
    seconds = max((r.ended for r in records), default=0.0) - min(
        (r.sent for r in records), default=0.0
    )
    tokens = sum(record.output_tokens for record in good)
    rate_base = seconds if seconds > 0 else float("inf")
    timelines = [(r.timeline, r.output_tokens) for r in good if r.timeline is not None]
    return LevelSummary(
        concurrency=concurrency,
        requests=len(records),
        failed=len(records) - len(good),
        seconds=seconds,
        prompt_tokens=float(np.mean([r.prompt_tokens for r in good])) if good else 0.0,
        output_tokens=tokens,
        output_rate=tokens / rate_base,
        request_rate=len(good) / rate_base,
        ttft=spread([r.ttft for r in good]),
        tpot=spread([r.tpot for r in good if r.tpot is not None]),
        itl=spread([gap for r in good for gap in r.gaps]),
        latency=spread([r.ended - r.sent for r in good]),
        phases=_phases(timelines),
        split_share=sum(t.split for t, _ in timelines) / max(len(timelines), 1),
        retries=sum(t.retries for t, _ in timelines),
        control_cpu_us=None if cost.control is None or not tokens else 1e6 * cost.control / tokens,
        client_cpu_share=cost.client / rate_base,
        errors=sorted({r.error for r in records if r.error is not None})[:10],
    )


def _phases(timelines: list[tuple[Timeline, int]]) -> PhaseSpreads:
    ttft = [t.phases for t, _ in timelines if t.phases is not None]
    second = [t.second_token for t, _ in timelines if t.second_token is not None]
    steps = [step for t, n in timelines if (step := t.decode_step(n)) is not None]
    hand_over = [
        t.second_token.transfer + t.second_token.first_step - step
        for t, n in timelines
        if t.second_token is not None and (step := t.decode_step(n)) is not None
    ]
    return PhaseSpreads(
        queue=spread([p.queue for p in ttft]),
        prefill=spread([p.prefill for p in ttft]),
        transfer=spread([p.transfer for p in ttft]),
        kv_transfer=spread([s.transfer for s in second]),
        first_step=spread([s.first_step for s in second]),
        decode_step=spread(steps),
        hand_over=spread(hand_over),
    )
