"""The router's fleet status as Prometheus metrics."""

from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.messages.fleet import FALLBACKS, FleetStatus, WorkerStatus

_LABELS = ("worker", "role")
_PAIR_LABELS = ("worker", "source", "path", "reason")
_PAIR_COUNTS = (
    *("transfers", "failed", "bytes", "wire_bytes"),
    *("seconds", "visible_seconds", "chunks_again", "chunks_spoiled", "generation_mismatches"),
    *("pipelined", "pipelined_visible_seconds"),
)


class FleetCollector:
    """Shows one status; without one only ``diptych_router_up 0``."""

    def __init__(self, status: FleetStatus | None) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics (the interface of prometheus_client)."""
        status = self._status
        up = 0 if status is None else 1
        yield GaugeMetricFamily("diptych_router_up", "The router answers.", value=up)
        if status is None:
            return
        for name in ("uptime", "queued", "open_requests", "draining"):
            value = float(getattr(status, name))
            yield GaugeMetricFamily(f"diptych_router_{name}", f"Router: {name}.", value=value)
        counters = msgspec.structs.asdict(status.counters)
        decisions = counters.pop("decisions")
        for name, value in counters.items():
            yield CounterMetricFamily(f"diptych_router_{name}", f"Router: {name}.", value=value)
        split = CounterMetricFamily(
            "diptych_router_decisions", "Split decisions by reason.", labels=("reason",)
        )
        for reason, value in decisions.items():
            split.add_metric((reason,), value)
        yield split
        yield from _workers(status.workers)
        yield from _pairs(status.workers)
        yield _fallbacks(status.workers)
        yield _expired(status.workers)


def fleet_text(status: FleetStatus | None) -> bytes:
    """Return the fleet's metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(FleetCollector(status))
    return generate_latest(registry)


def _workers(workers: tuple[WorkerStatus, ...]) -> Iterator[Metric]:
    ready = GaugeMetricFamily("diptych_worker_ready", "Health is ready.", labels=_LABELS)
    age = GaugeMetricFamily("diptych_worker_age_seconds", "Since last heard.", labels=_LABELS)
    for worker in workers:
        ready.add_metric((worker.worker, worker.role), float(worker.health == "ready"))
        age.add_metric((worker.worker, worker.role), worker.age)
    yield ready
    yield age
    for name in _fields(workers, "load"):
        gauge = GaugeMetricFamily(f"diptych_worker_{name}", f"Worker: {name}.", labels=_LABELS)
        for worker in workers:
            gauge.add_metric((worker.worker, worker.role), float(getattr(worker.load, name)))
        yield gauge
    for name in _fields(workers, "counters"):
        counter = CounterMetricFamily(
            f"diptych_worker_{name}", f"Worker: {name} since start.", labels=_LABELS
        )
        for worker in workers:
            counter.add_metric((worker.worker, worker.role), getattr(worker.counters, name))
        yield counter


def _pairs(workers: tuple[WorkerStatus, ...]) -> Iterator[Metric]:
    """Yield KV by source, path and why that path."""
    for name in _PAIR_COUNTS:
        counter = CounterMetricFamily(
            f"diptych_kv_{name}", f"KV hand-overs of a pair: {name}.", labels=_PAIR_LABELS
        )
        for worker in workers:
            for pair in worker.pairs:
                labels = (worker.worker, pair.source, pair.path or "none", pair.reason or "none")
                counter.add_metric(labels, getattr(pair, name))
        yield counter
    gate = GaugeMetricFamily(
        "diptych_kv_pipelining",
        "Why the newest hand-over of a pair was announced while it was computed, or was not.",
        labels=("worker", "source", "reason"),
    )
    for worker in workers:
        for pair in worker.pairs:
            if pair.former:
                continue  # the pair's newest path has these labels, too
            gate.add_metric((worker.worker, pair.source, pair.pipeline_reason or "none"), 1.0)
    yield gate


def _fallbacks(workers: tuple[WorkerStatus, ...]) -> Metric:
    counter = CounterMetricFamily(
        "diptych_kv_fallbacks",
        "How often a pair took a path that was not its first choice, by reason.",
        labels=("worker", "source", "path", "reason"),
    )
    for worker in workers:
        for pair in worker.pairs:
            if pair.path is not None and pair.reason in FALLBACKS:
                labels = (worker.worker, pair.source, pair.path, pair.reason)
                counter.add_metric(labels, pair.chosen)
    return counter


def _expired(workers: tuple[WorkerStatus, ...]) -> Metric:
    """Return what sources tell of their readers, under the labels of the pair."""
    counter = CounterMetricFamily(
        "diptych_kv_leases_expired",
        "Hand-overs of a pair whose reader let the lease run out.",
        labels=("worker", "source"),
    )
    for worker in workers:
        for reader in worker.readers:
            counter.add_metric((reader.reader, worker.worker), reader.leases_expired)
    return counter


def _fields(workers: tuple[WorkerStatus, ...], part: str) -> tuple[str, ...]:
    return getattr(workers[0], part).__struct_fields__ if workers else ()
