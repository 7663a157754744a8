"""The gateway's Prometheus metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from services.gateway.histogram import TokenHistogram
from services.gateway.timeline import Timeline

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_SLOW = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
PHASES = ("queue", "prefill", "transfer", "first_step")
HAND_OVER = ("transfer", "first_step")


class Metrics:
    """One registry per gateway, so that several can live in one process (tests)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"diptych_{name}_seconds", text, buckets=buckets, registry=self.registry
            )

        self.ttft = histogram("ttft", "Arrival at the gateway to first token.", _SLOW)
        self.tpot = histogram("tpot", "(Last - first token) / (tokens - 1).", _FAST)
        self.itl = TokenHistogram(
            "diptych_itl_seconds",
            "Gap between two arrivals of tokens of a request.",
            _FAST,
            self.registry,
        )
        self.e2e = histogram("request", "Arrival at the gateway to the end.", _SLOW)
        phase = Histogram(
            "diptych_ttft_phase_seconds",
            "Parts of the time to first token; they add up to it.",
            ("phase",),
            buckets=_SLOW,
            registry=self.registry,
        )
        self._phases = {name: phase.labels(name) for name in PHASES}
        hand_over = Histogram(
            "diptych_hand_over_seconds",
            "First token sampled to decode's first own token, in its two parts.",
            ("phase",),
            buckets=_FAST,
            registry=self.registry,
        )
        self._hand_over = {name: hand_over.labels(name) for name in HAND_OVER}
        self.requests = self._counter("requests", "Ended requests.", "endpoint", "outcome")
        self.refused = self._counter("http_errors", "HTTP answers of 4xx and 5xx.", "status")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests.")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens that were cached.")
        self.output_tokens = self._counter("output_tokens", "Output tokens received.")
        self.open = Gauge(
            "diptych_gateway_open_requests", "Requests being served.", registry=self.registry
        )

    def observe_timeline(self, timeline: Timeline) -> None:
        """Record the phases of one request."""
        if timeline.phases is not None:
            for name in PHASES:
                self._phases[name].observe(getattr(timeline.phases, name))
        if timeline.second_token is not None:
            for name in HAND_OVER:
                self._hand_over[name].observe(getattr(timeline.second_token, name))

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"diptych_gateway_{name}", text, labels, registry=self.registry)
