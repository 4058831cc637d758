"""Counters of an HTTP front end, and the metrics page of all processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.registry import Collector
from starlette.types import Scope

BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 60.0)


class FrontMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("route", "status")
        self.requests = Counter(
            "sdxl_http_requests", "answers, by route and status", labels, registry=self.registry
        )
        self.seconds = Histogram(
            "sdxl_http_seconds",
            "time until the answer ended",
            ("route",),
            buckets=BUCKETS,
            registry=self.registry,
        )

    def answered(self, scope: Scope, status: int, seconds: float) -> None:
        """Count an answer. Status 0: the client disconnected before it."""
        route = getattr(scope.get("route"), "path", "unknown")
        self.requests.labels(route, str(status or 499)).inc()
        self.seconds.labels(route).observe(seconds)

    def collect(self) -> list[Any]:
        return list(self.registry.collect())


def page(metrics: Sequence[Any]) -> bytes:
    """Return metrics in Prometheus' text format. Families of the same name are merged."""
    return generate_latest(_Gathered(metrics))


class _Gathered(Collector):
    def __init__(self, metrics: Sequence[Any]) -> None:
        self.families: dict[str, Any] = {}
        for metric in metrics:
            known = self.families.setdefault(metric.name, metric)
            if known is not metric:
                known.samples.extend(metric.samples)

    def collect(self) -> Iterator[Any]:
        yield from self.families.values()
