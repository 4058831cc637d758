"""In-flight against static batching on the same engines: mean and p99 latency by load.

sdxl bench batching [--model mini] [--costs costs.json]

Calls of every bucket are measured, deep and shallow. Then each discipline serves the same Poisson
arrivals in simulated time, with equal and with mixed requests: in flight by the service's policy;
static by a greedy batcher that starts with the queue and runs as long as its longest request, with
the best batch size and wait for that load; static with equal requests only; and one by one. "Ideal"
runs images one by one at a full call's cost per row, which no device does. Encoding and decoding
are omitted.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from eval.measuring.options import add_option
from eval.measuring.timing import quantile
from sdxl import deepcache
from sdxl.arguments import MODEL, Parser
from sdxl.cost import Costs
from sdxl.flight import Flight, Network, State
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline
from sdxl.policy import Group, Limits, plan_tick

USUAL = GenerationParams()
Kind = tuple[int, int]
"""steps and cache interval"""
MEDIUM = (20, 2)
MIXES: dict[str, tuple[Kind, ...]] = {
    "all of medium quality": (MEDIUM,),
    "10 exact steps, 20 or 30 at interval 2": ((10, 1), MEDIUM, (30, 2)),
    "10, 20 or 40 steps": ((10, 2), (20, 2), (40, 2)),
}
ROWS = 2
OURS = "in flight"
IMAGES, WARM_SHARE = 2000, 0.1
LOADS = (0.5, 0.8, 0.95)
WAITS = (0.0, 0.25, 0.5, 1.0)
"""as shares of one image's time"""


class Arrival(NamedTuple):
    at_s: float
    kind: Kind


@dataclass(frozen=True)
class MeasuredDevice:
    """Measured calls at one size, and the service's limits."""

    costs: Costs
    limits: Limits
    image: Flight
    """an image of that size"""

    def batch_s(self, images: int, kind: Kind) -> float:
        """Seconds of all steps of a static batch."""
        bucket = self.limits.bucket(images * ROWS)
        deep, shallow = self.call_s("unet_deep", bucket), self.call_s("unet_shallow", bucket)
        return sum(deep if step.is_deep else shallow for step in deepcache.plan(*kind))

    def call_s(self, network: Network, bucket: int) -> float:
        return self.costs.tick_s(Group(self.image.call(network), (), bucket))

    @property
    def batches(self) -> list[int]:
        return [bucket // ROWS for bucket in self.limits.buckets if bucket >= ROWS]

    def capacity(self, mix: Sequence[Kind]) -> float:
        """Images a second of the best batch size, always full, with one kind a batch."""
        return max(
            images / statistics.fmean(self.batch_s(images, kind) for kind in mix)
            for images in self.batches
        )


def measure(pipeline: Pipeline) -> MeasuredDevice:
    costs = Costs()
    for bucket in pipeline.limits().buckets:
        guidance = USUAL.guidance if bucket >= ROWS else 1.0
        few = replace(USUAL, prompt="a ring", seed=0, steps=6, cache_interval=2)
        request = replace(few, guidance=guidance)
        params = [pipeline.resolve(request)] * max(bucket // ROWS, 1)
        conditionings = pipeline.encode(params)
        for _ in range(2):
            loop = pipeline.in_flight()
            for each, conditioning in zip(params, conditionings, strict=True):
                loop.submit(pipeline.request(each, conditioning))
            loop.drain()
        costs.ticks |= loop.costs.ticks
    return make_device(costs, pipeline.limits())


def make_device(costs: Costs, limits: Limits) -> MeasuredDevice:
    image = Flight(-1, next(iter(costs.ticks)).call.axes, deepcache.plan(1, 1))
    rows = max(costs.knee(image, limits.buckets), ROWS)
    crowded_rows = costs.knee(image, limits.buckets, tolerance=0.0)
    return MeasuredDevice(costs, replace(limits, rows=rows, crowded_rows=crowded_rows), image)


def read_device(path: Path) -> MeasuredDevice:
    costs = Costs.from_dict(json.loads(path.read_text()))
    buckets = tuple(sorted({key.bucket for key in costs.ticks}))
    return make_device(costs, Limits(buckets, buckets[-1]))


def draw_arrivals(rate: float, mix: Sequence[Kind], count: int = IMAGES) -> list[Arrival]:
    rng, now, arrivals = random.Random(1), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        arrivals.append(Arrival(now, rng.choice(mix)))
    return arrivals


def serve_in_flight(device: MeasuredDevice, arrivals: Sequence[Arrival]) -> list[float]:
    latencies = [0.0] * len(arrivals)
    flights: dict[int, Flight] = {}
    now, coming = 0.0, 0
    while coming < len(arrivals) or flights:
        if not flights:
            now = max(now, arrivals[coming].at_s)
        while coming < len(arrivals) and arrivals[coming].at_s <= now:
            flights[coming] = Flight(
                coming, device.image.axes, deepcache.plan(*arrivals[coming].kind)
            )
            coming += 1
        plan = plan_tick(list(flights.values()), device.limits, now)
        for id_ in plan.admitted:
            flights[id_] = replace(flights[id_], state=State.RUNNING)
        now += sum(device.costs.tick_s(group) for group in plan.groups)
        for id_ in (id_ for group in plan.groups for id_ in group.ids):
            flights[id_] = flights[id_].advanced()
            if flights[id_].is_done:
                latencies[id_] = now - arrivals[id_].at_s
                del flights[id_]
    return latencies


def serve_static(
    device: MeasuredDevice,
    arrivals: Sequence[Arrival],
    most: int,
    wait_s: float = 0.0,
    *,
    is_alike: bool = False,
) -> list[float]:
    """A batch starts when it is full or its first request has waited `wait_s`. `is_alike`: batch
    only requests of the first one's kind."""
    latencies = [0.0] * len(arrivals)
    waiting = list(range(len(arrivals)))
    now = 0.0
    while waiting:
        first = arrivals[waiting[0]]
        fitting = (i for i in waiting if not is_alike or arrivals[i].kind == first.kind)
        candidates = list(islice(fitting, most))
        full_s = arrivals[candidates[-1]].at_s if len(candidates) == most else math.inf
        now = max(now, min(full_s, first.at_s + wait_s))
        batch = [i for i in candidates if arrivals[i].at_s <= now]
        now += max(device.batch_s(len(batch), kind) for kind in {arrivals[i].kind for i in batch})
        for i in batch:
            latencies[i] = now - arrivals[i].at_s
            waiting.remove(i)
    return latencies


def find_best_static(
    device: MeasuredDevice, arrivals: Sequence[Arrival], *, is_alike: bool
) -> tuple[list[float], str]:
    alone_s = device.batch_s(1, MEDIUM)
    waits_s = [share * alone_s for share in WAITS]
    tried = []
    for most, wait_s in itertools.product(device.batches, waits_s):
        latencies = serve_static(device, arrivals, most, wait_s, is_alike=is_alike)
        tried.append((latencies, f"batch {most}, wait {wait_s:.3f} s"))
    return min(tried, key=lambda each: p99(each[0]))


def serve_ideally(device: MeasuredDevice, arrivals: Sequence[Arrival]) -> list[float]:
    latencies, now = [], 0.0
    for arrival in arrivals:
        now = max(now, arrival.at_s)
        now += min(device.batch_s(images, arrival.kind) / images for images in device.batches)
        latencies.append(now - arrival.at_s)
    return latencies


def drop_warm_up(latencies: Sequence[float]) -> Sequence[float]:
    return latencies[int(len(latencies) * WARM_SHARE) :]


def p99(latencies: Sequence[float]) -> float:
    return quantile(drop_warm_up(latencies), 0.99)


def table(device: MeasuredDevice) -> str:
    limits = device.limits
    lines = [f"{limits.rows} rows in flight, {limits.most_rows} while many wait"]
    for name, mix in MIXES.items():
        capacity = device.capacity(mix)
        lines.append(f"\n{name}; 100% is {capacity:.2f} images/s")
        head = f"{'load':<6}{'discipline':<14}{'mean s':>9}{'p99 s':>9}{'in flight over it':>19}"
        lines.append(head)
        for load in LOADS:
            lines += rows(device, draw_arrivals(load * capacity, mix), load)
    return "\n".join(lines)


def compare_disciplines(
    device: MeasuredDevice, arrivals: Sequence[Arrival]
) -> dict[str, tuple[list[float], str]]:
    """Latencies by discipline, with the best batch and wait of the static ones."""
    return {
        OURS: (serve_in_flight(device, arrivals), ""),
        "static": find_best_static(device, arrivals, is_alike=False),
        "static, alike": find_best_static(device, arrivals, is_alike=True),
        "one by one": (serve_static(device, arrivals, 1), ""),
        "ideal": (serve_ideally(device, arrivals), ""),
    }


def rows(device: MeasuredDevice, arrivals: Sequence[Arrival], load: float) -> Iterator[str]:
    by_name = compare_disciplines(device, arrivals)
    for title, (latencies, note) in by_name.items():
        mean, ratio = (
            statistics.fmean(drop_warm_up(latencies)),
            p99(by_name[OURS][0]) / p99(latencies),
        )
        yield f"{load:<6.0%}{title:<14}{mean:>9.3f}{p99(latencies):>9.3f}{ratio:>19.2f}  {note}"


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="sdxl bench batching", description=__doc__)
    add = partial(add_option, parser)
    add("--model", "mini", MODEL)
    add("--backend", "auto", "of the engines")
    add("--costs", None, "use costs that --save wrote", "FILE", type=Path)
    add("--save", None, "write the measured costs here", "FILE", type=Path)
    options = parser.parse_args(argv)

    if options.costs:
        device = read_device(options.costs)
    else:
        import engines

        device = measure(engines.load(options.model, options.backend))
    if options.save:
        options.save.write_text(json.dumps(device.costs.as_dict()))
    print(table(device))
    return 0
