"""A worker's metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sdxl.admission import Reason
from sdxl.cost import Costs
from sdxl.engine import Engines
from sdxl.flight import Flight, Priority, State
from sdxl.policy import Group
from serve.worker.gpu_meter import GpuMeter

TICK_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
STAGE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 60.0)


class WorkerMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        call = ("network", "bucket")
        self.ticks = histogram("sdxl_tick_seconds", "UNet calls", call, buckets=TICK_BUCKETS)
        text = "images in UNet calls; over the count of calls: occupancy"
        self.images_in_ticks = counter("sdxl_tick_images", text, call)
        self.steps = counter("sdxl_steps", "denoising steps, by kind", ("kind",))
        self.images = counter("sdxl_images", "orders, by how they ended", ("outcome",))
        self.stages = histogram(
            "sdxl_stage_seconds", "stages of an image", ("stage",), buckets=STAGE_BUCKETS
        )
        text = "orders refused at once, by reason"
        self.refusals = counter("sdxl_refusals", text, ("reason",))
        for reason in get_args(Reason):
            self.refusals.labels(reason)
        text = "device seconds that waiting images will take"
        self.waiting_s = gauge("sdxl_waiting_work_seconds", text, ("priority",))
        self.queued = gauge("sdxl_images_queued", "images that wait")
        self.running = gauge("sdxl_images_running", "images in flight")
        text = "CUDA graphs that could not be captured; their calls are slower"
        self.failed_captures = counter("sdxl_failed_captures", text)
        text = "kernels compiled after the start; each one delayed requests"
        self.compiled_kernels = counter("sdxl_compiled_kernels", text)
        self._seen: dict[Counter, int] = {}
        text = "the engines; `slower` is 1 if PyTorch runs on a GPU instead of TensorRT"
        self.engines = gauge("sdxl_engines_info", text, ("backend", "precision", "slower"))
        GpuMeter(self.registry, work="images")

    def starts(self, engines: Engines) -> None:
        """Count compiled kernels from now on."""
        self._seen[self.compiled_kernels] = engines.compiled_kernels()

    def _count(self, counter: Counter, total: int) -> None:
        counter.inc(total - self._seen.get(counter, 0))
        self._seen[counter] = total

    def runs(self, engines: Mapping[str, Any], is_slower: bool) -> None:
        names = (str(engines.get(name, "")) for name in ("backend", "precision"))
        self.engines.labels(*names, str(int(is_slower))).set(1)

    def observe(self, group: Group, seconds: float) -> None:
        labels = group.network, str(group.bucket)
        self.ticks.labels(*labels).observe(seconds)
        self.images_in_ticks.labels(*labels).inc(len(group.ids))
        if not group.call.net:
            self.steps.labels(group.network.removeprefix("unet_")).inc(len(group.ids))

    def ended(self, outcome: str, timings: Mapping[str, float]) -> None:
        self.images.labels(outcome).inc()
        for name, seconds in dict(timings).items():
            self.stages.labels(name.removesuffix("_s")).observe(seconds)

    def collect(self, flights: Sequence[Flight], engines: Engines) -> list[Any]:
        waiting = [f for f in flights if f.state is State.QUEUED]
        self.queued.set(len(waiting))
        self.running.set(len(flights) - len(waiting))
        for priority in Priority:
            seconds = sum(f.work_s for f in waiting if f.priority is priority)
            self.waiting_s.labels(priority.name.lower()).set(seconds)
        self._count(self.failed_captures, engines.failed_captures())
        self._count(self.compiled_kernels, engines.compiled_kernels())
        return list(self.registry.collect())


@dataclass
class MeteredCosts(Costs):
    """Costs that also report every call to a meter."""

    on_call: Callable[[Group, float], None] = lambda group, seconds: None

    def observe(
        self, group: Group, seconds: float, between_s: float = 0.0, *, is_usual: bool = True
    ) -> None:
        super().observe(group, seconds, between_s, is_usual=is_usual)
        self.on_call(group, seconds)
