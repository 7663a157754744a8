"""A histogram for what happens with every token."""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric


class TokenHistogram:
    """Looks like prometheus_client's, at a tenth of the cost; for one thread only."""

    def __init__(
        self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._text = name, text
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._created = time.time()
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count one value; a bucket holds what is at most its bound."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """Yield the metric (the interface of prometheus_client)."""
        family = HistogramMetricFamily(self._name, self._text)
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((str(bound) if bound != float("inf") else "+Inf", float(total)))
        family.add_metric((), buckets, self._sum)
        family.add_sample(f"{self._name}_created", {}, self._created)
        yield family
