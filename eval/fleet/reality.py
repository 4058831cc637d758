"""The simulation beside a service of the embedded model on this machine, with the same requests.

The simulation decides which requests wait, join and are refused, and when each is done. From the
compared run it takes the mean seconds of calls, encoding and decoding, because replicas share the
cores and slow each other down, and the median that HTTP and Ray add. A closed loop before measures
the time between calls.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from eval.fleet.fronts import OURS, Fronts, Shape
from eval.fleet.gpus import QUEUE, SimulatedGpu
from eval.fleet.ticks import TickFleet
from eval.fleet.traffic import NONE, PLANS, PictureKind
from eval.measuring.timing import quantile
from eval.service.client import local_service, metrics_page, unlimited_client
from eval.service.load import PROMPT, LoadAnswers, request_picture
from eval.service.traffic import closed_loop
from sdxl.cost import CostKey, Costs
from sdxl.flight import Flight, Network
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline
from sdxl.policy import Limits

REPLICAS, LOADS = (1, 2, 4), (0.7, 2.0)
"""Loads are shares of the rate of a closed loop with `CLIENTS` clients for each replica."""
CLIENTS, CLOSED_S, RUN_S, RUNS = 8, 10.0, 40.0, 3
DEADLINE_S, LONG_S = 4.0, 60.0
"""of requests, and of requests in the closed loop"""
SUMS = re.compile(r"sdxl_(?:tick|stage)_seconds_(sum|count){(.*)} (\S+)")
ROWS = re.compile(r"(\d+) rows in flight, (\d+) while many wait")
"""a replica's log line at its start"""
LABEL = re.compile(r'(\w+)="(\w+)"')


@dataclass(frozen=True)
class MeasuredReplica(SimulatedGpu):
    pipeline: Pipeline = field(kw_only=True)
    measured: Costs = field(kw_only=True)
    rows: tuple[int, int] = field(kw_only=True)

    @property
    def standard(self) -> Flight:
        return flight_of(self.pipeline, GenerationParams())

    @cached_property
    def limits(self) -> Limits:
        limits = self.measured.knees(replace(self.pipeline.limits(), queue=QUEUE), self.standard)
        return replace(limits, rows=self.rows[0], crowded_rows=self.rows[1])

    @cached_property
    def costs(self) -> Costs:
        return self.measured


def flight_of(pipeline: Pipeline, params: GenerationParams) -> Flight:
    side = pipeline.sizes.default
    return Flight(-1, pipeline.axes(side, side), pipeline.plan(params))


@dataclass(frozen=True)
class Trace:
    """Requests at fixed times; TickFleet reads it as Traffic."""

    kinds: list[PictureKind]
    at_s: Any
    kind: Any

    @classmethod
    def drawn(cls, kinds: list[PictureKind], rate: float, seed: int) -> Trace:
        rng = np.random.default_rng(seed)
        at_s = rng.exponential(1 / rate, int(2 * rate * RUN_S)).cumsum()
        at_s = at_s[at_s < RUN_S]
        return cls(kinds, at_s, rng.choice(len(kinds), len(at_s), p=[k.share for k in kinds]))

    def arrivals(self, rng: Any, begin_s: float, length_s: float) -> tuple[Any, Any, Any]:
        part = slice(*self.at_s.searchsorted([begin_s, begin_s + length_s]))
        return self.at_s[part], self.kind[part], np.full(len(self.at_s[part]), NONE)


@dataclass(frozen=True)
class TraceResult:
    p50: float
    p99: float
    refused: float
    """share of the requests; late requests are refused, too"""

    @classmethod
    def of(cls, answers: LoadAnswers) -> TraceResult:
        p50, p99 = quantile(answers.latencies, 0.5), quantile(answers.latencies, 0.99)
        return cls(p50, p99, 1 - len(answers.latencies) / answers.statuses.total())


Seconds = Counter[tuple[str, ...]]
"""sums and counts of calls by network and bucket, and of stages"""


@dataclass(frozen=True)
class LoadedService:
    url: str
    kinds: list[PictureKind]
    log: Path

    def rows(self) -> tuple[int, int]:
        """The usual and the most rows in flight of the replica with the most rows."""
        chosen = [(int(a), int(b)) for a, b in ROWS.findall(self.log.read_text())]
        return max(chosen)

    def seconds(self) -> Seconds:
        """The sums over all replicas since their start."""
        seconds = Seconds()
        for kind, labels, value in SUMS.findall(metrics_page(self.url)):
            label = dict(LABEL.findall(labels))
            key = (label["network"], label["bucket"]) if "network" in label else (label["stage"],)
            seconds[kind, *key] += cast(int, float(value))
        return seconds

    async def run(self, trace: Trace) -> LoadAnswers:
        answers, began_s = LoadAnswers(), time.perf_counter()
        async with unlimited_client(self.url, LONG_S) as http, asyncio.TaskGroup() as group:
            for at_s, kind in zip(trace.at_s, trace.kind, strict=True):
                await asyncio.sleep(began_s + at_s - time.perf_counter())
                request = request_picture(http, answers, body_of(kind, DEADLINE_S), began_s + at_s)
                group.create_task(request)
        return answers

    async def saturate(self, clients: int) -> float:
        """Keep `clients` requests under way; return the rate of pictures."""
        answers, rng, began_s = LoadAnswers(), np.random.default_rng(0), time.perf_counter()
        shares = [kind.share for kind in self.kinds]
        async with unlimited_client(self.url, LONG_S) as http:

            async def send(number: int, due_s: float) -> None:
                body = body_of(rng.choice(len(shares), p=shares), LONG_S)
                await request_picture(http, answers, body, due_s)

            await closed_loop(send, clients, CLOSED_S)
        return len(answers.latencies) / (time.perf_counter() - began_s)


def body_of(kind: int, deadline_s: float) -> dict[str, Any]:
    steps, interval = list(PLANS)[kind]
    sampling = {"steps": steps, "cache_interval": interval}
    return {"prompt": PROMPT, **sampling, "deadline_s": deadline_s}


def costs_of(seconds: Seconds, standard: Flight, between_s: float) -> Costs:
    costs = Costs(between_s=between_s)
    for (kind, *key), count in seconds.items():
        if kind != "count":
            continue
        mean_s = seconds["sum", *key] / count
        match key:
            case [network, bucket]:
                call = standard.call(cast(Network, network))
                costs.ticks[CostKey(call, int(bucket))] = mean_s
            case ["encode"]:
                costs.encode_s = mean_s
            case ["decode" | "file"]:
                costs.decode_s += mean_s
    return costs


def between_calls_s(seconds: Seconds, busy_s: float) -> float:
    calls_s, calls = (
        sum(value for (kind, *key), value in seconds.items() if kind == counted and len(key) == 2)
        for counted in ("sum", "count")
    )
    return max(busy_s - calls_s, 0.0) / calls


def simulate(gpu: MeasuredReplica, replicas: int, trace: Trace, added_s: float) -> TraceResult:
    fronts = Fronts(Shape(1, replicas, 1), OURS, np.zeros(0), np.random.default_rng(2))
    fleet = TickFleet(gpu, trace, fronts, clients=1, deadline_s=DEADLINE_S)
    out = fleet.run(RUN_S + 2 * DEADLINE_S)
    late, out.latencies[-1] = int(out.latencies[-1]), 0
    share = (out.refused + late) / out.arrived
    return TraceResult(out.quantile(0.5) + added_s, out.quantile(0.99) + added_s, share)


def rows() -> Iterator[list[str]]:
    """The medians of `RUNS` runs at each load, as measured and as simulated."""
    import engines

    names = ("p50 s", "p99 s", "refused")
    yield ["replicas, load", "requests", *(f"{n}{by}" for n in names for by in ("", ", simulated"))]
    pipeline = engines.load("mini")
    params = [GenerationParams(steps=steps, cache_interval=interval) for steps, interval in PLANS]
    flights = [flight_of(pipeline, each) for each in params]
    kinds = [PictureKind(share, f) for share, f in zip(PLANS.values(), flights, strict=True)]
    for replicas in REPLICAS:
        flags = ("--llm", "none", "--replicas", str(replicas))
        with TemporaryDirectory() as folder, local_service(flags, Path(folder, "log")) as url:
            service = LoadedService(url, kinds, Path(folder, "log"))
            yield from rows_of(service, replicas, pipeline)


def rows_of(service: LoadedService, replicas: int, pipeline: Pipeline) -> Iterator[list[str]]:
    asyncio.run(service.saturate(CLIENTS * replicas))
    before, began_s = service.seconds(), time.perf_counter()
    rate = asyncio.run(service.saturate(CLIENTS * replicas))
    busy_s = replicas * (time.perf_counter() - began_s)
    between_s = between_calls_s(service.seconds() - before, busy_s)
    for load in LOADS:
        pairs, count = [], 0
        for seed in range(RUNS):
            trace, before = Trace.drawn(service.kinds, load * rate, seed), service.seconds()
            answers = asyncio.run(service.run(trace))
            standard = flight_of(pipeline, GenerationParams())
            gpu = MeasuredReplica(
                "CPU",
                "measured",
                ratios=(1.0, 1.0),
                pipeline=pipeline,
                measured=costs_of(service.seconds() - before, standard, between_s),
                rows=service.rows(),
            )
            simulated = simulate(gpu, replicas, trace, statistics.median(answers.added))
            pairs.append((TraceResult.of(answers), simulated))
            count += len(trace.at_s)
        medians = [
            statistics.median(getattr(pair[i], name) for pair in pairs)
            for name in ("p50", "p99", "refused")
            for i in (0, 1)
        ]
        yield [
            f"{replicas}, {load:.0%} of {rate:.1f} a second",
            str(count),
            *(f"{s:.2f}" for s in medians[:4]),
            *(f"{s:.1%}" for s in medians[4:]),
        ]
