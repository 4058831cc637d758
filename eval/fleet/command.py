"""sdxl bench fleet [--gpu h200 h100 l40s] [--replicas 8 64 1000 10000] [--seconds 60] [--load 0.8]

A fleet of any size, simulated with the service's own policy, admission, costs, router and
autoscaler (sdxl/policy.py, admission.py, cost.py, fleet.py). Every request and every routing
decision is simulated; a replica is a queue whose pace is calibrated tick by tick. `check` compares
this model with simulated ticks.
Clusters have at most 250 replicas; a request reaches any front end with equal chance. So clusters
are independent, and `scale` simulates a part of them on each core.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from eval.fleet.calibration import Pace
from eval.fleet.flow import Flow
from eval.fleet.fronts import OURS, POLICIES, Fronts, Shape
from eval.fleet.gpus import RATIOS, SimulatedGpu
from eval.fleet.outcome import Outcome
from eval.fleet.scaling import ScaledFlow
from eval.fleet.ticks import TickFleet
from eval.fleet.traffic import LOADING_S, Level, Traffic, bursts, day, kinds, steady
from eval.measuring.markdown import table_lines
from sdxl.arguments import Parser, add_option, number, whole
from sdxl.params import InvalidParams

CLUSTER, FRONT_RATE, FEWEST_FRONTS = 250, 250.0, 2
"""limits of a cluster's replicas, a front end's requests a second, a cluster's front ends"""
WARM_S = 60.0
PICTURES, LONGEST_S = 20_000, 600.0
SECTIONS = ("check", "routers", "scale", "events", "autoscaling")
HEAD = ("goodput", "mean s", "p50", "p99", "refused", "loads", "GPU-hours", "$ per 1000")


@dataclass(frozen=True)
class FleetBench:
    gpu: SimulatedGpu
    load: float
    seconds: float
    price: float
    """dollars for a GPU's hour"""

    @cached_property
    def kinds(self) -> Any:
        return kinds()

    @cached_property
    def pace(self) -> Pace:
        return Pace.measured(self.gpu, self.kinds)

    def shape(self, replicas: int) -> Shape:
        clusters = math.ceil(replicas / CLUSTER)
        each = replicas // clusters
        return Shape(
            clusters, each, max(math.ceil(each * self.pace.rate / FRONT_RATE), FEWEST_FRONTS)
        )

    def traffic(self, replicas: int, level: Level) -> Traffic:
        return Traffic(self.load * replicas * self.pace.rate, level, self.kinds)

    def fronts(self, replicas: int, policy: str = OURS, files: Any = LOADING_S) -> Fronts:
        return Fronts(self.shape(replicas), policy, files, np.random.default_rng(2))

    def flow(
        self,
        replicas: int,
        policy: str = OURS,
        level: Level = steady,
        files: Any = LOADING_S,
        **options: Any,
    ) -> Flow:
        fronts = self.fronts(replicas, policy, files)
        traffic = self.traffic(fronts.shape.all_replicas, level)
        return Flow(self.gpu, self.pace, traffic, fronts, **options)

    def row(self, name: object, out: Outcome) -> list[str]:
        hours = out.gpu_s / 3600
        return [
            f"{name:,}" if isinstance(name, int) else str(name),
            f"{out.goodput:.4f}",
            *(f"{s:.2f}" for s in (out.mean_s, out.quantile(0.5), out.quantile(0.99))),
            f"{out.refused / max(out.arrived, 1):.3%}",
            f"{out.loads / max(out.arrived, 1):.1%}",
            f"{hours:,.2f}",
            f"{1000 * hours * self.price / max(out.finished, 1):.3f}",
        ]

    def long_enough_s(self, replicas: int) -> float:
        """A small fleet runs longer, so that its p99 covers enough pictures."""
        return max(self.seconds, min(LONGEST_S, PICTURES / (replicas * self.pace.rate)))

    # -- sections: each yields the head of its table, then the rows -----------------------------

    def check(self, sizes: Sequence[int]) -> Iterator[list[str]]:
        yield ["one trace, 8 replicas", *HEAD]
        flow = self.flow(8)
        ticks = TickFleet(self.gpu, flow.traffic, self.fronts(8))
        yield self.row("ticks", ticks.run(self.seconds, WARM_S))
        yield self.row("pictures", flow.run(self.seconds, WARM_S))

    def routers(self, sizes: Sequence[int]) -> Iterator[list[str]]:
        yield ["replicas, router", *HEAD]
        for replicas in sizes:
            for policy in POLICIES:
                out = self.flow(replicas, policy).run(self.long_enough_s(replicas), WARM_S)
                yield self.row(f"{replicas:,} {policy}", out)

    def scale(self, sizes: Sequence[int]) -> Iterator[list[str]]:
        yield ["replicas", *HEAD, "CPU s", "s"]
        for replicas in sizes:
            began_s, total, cpu_s = time.perf_counter(), Outcome(), 0.0
            for out, part_s in self._parts(replicas):
                total.add(out)
                cpu_s += part_s
            took_s = time.perf_counter() - began_s
            yield [*self.row(replicas, total), f"{cpu_s:.0f}", f"{took_s:.0f}"]

    def _parts(self, replicas: int) -> Iterator[tuple[Outcome, float]]:
        """Simulate whole clusters on each core. Yield each core's outcome and CPU seconds."""
        shape, seconds = self.shape(replicas), self.long_enough_s(replicas)
        parts = min(len(os.sched_getaffinity(0)), shape.clusters)
        if parts == 1:
            yield self.part(seconds, replicas)
            return
        clusters = np.array_split(np.arange(shape.clusters), parts)
        sizes = [shape.replicas * len(each) for each in clusters]
        # Measure the pace once, before this object is copied to the processes.
        assert self.pace
        with ProcessPoolExecutor(parts, multiprocessing.get_context("spawn")) as pool:
            yield from pool.map(partial(self.part, seconds), sizes, range(1, parts + 1))

    def part(self, seconds: float, replicas: int, seed: int = 1) -> tuple[Outcome, float]:
        began_s = time.process_time()
        out = self.flow(replicas, seed=seed).run(seconds, WARM_S)
        return out, time.process_time() - began_s

    def events(self, sizes: Sequence[int]) -> Iterator[list[str]]:
        yield ["replicas, event", *HEAD]
        run_s = max(self.seconds, 600.0)
        for policy in (OURS, POLICIES[0]):
            out = self.flow(CLUSTER, policy, bursts()).run(run_s, WARM_S)
            yield self.row(f"{CLUSTER}, bursts, {policy}", out)
            out = self.flow(CLUSTER, policy, hours_to_failure=10.0).run(run_s, WARM_S)
            yield self.row(f"{CLUSTER}, each fails every 10 h, {policy}", out)

    def autoscaling(self, sizes: Sequence[int]) -> Iterator[list[str]]:
        yield ["a day's curve in 40 minutes, at most 64 replicas", *HEAD]
        length = 2400
        traffic = Traffic(0.4 * 64 * self.pace.rate, day(length), self.kinds)
        flow = Flow(self.gpu, self.pace, traffic, self.fronts(64))
        yield self.row("by arriving work", ScaledFlow(flow, begin=16).run(length))


def build_parser() -> Parser:
    parser = Parser(
        prog="sdxl bench fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = partial(add_option, parser)
    add("--gpu", ["h200"], "a fleet of each", choices=tuple(RATIOS))
    add("--replicas", [8, 64, 1000, 10_000], "sizes of the fleet", type=whole)
    add("--seconds", 60.0, "of simulated traffic, after a minute", type=number)
    add("--load", 0.8, "share of the capacity that arrives", type=number)
    add("--price-per-hour", 3.0, "of a GPU: an assumption", "DOLLARS", type=number)
    add("--sections", list(SECTIONS), "what to simulate", choices=SECTIONS)
    return parser


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    if min(options.replicas) < 1:
        raise InvalidParams("replicas", min(options.replicas), "must be at least 1")
    for name in options.gpu:
        bench = FleetBench(
            SimulatedGpu(name), options.load, options.seconds, options.price_per_hour
        )
        print(f"{name}: the ticks of an H200 in FP8 × {RATIOS[name][0]:.2f}")
        rate = f"{bench.pace.rate:.2f} pictures/s"
        print(f"a replica makes {rate} of this mix; load {options.load:.0%}")
        for section in options.sections:
            head, *rows = getattr(bench, section)(options.replicas)
            print(f"\n{name}, {section}\n", *table_lines(head, rows), sep="\n", flush=True)
        print()
    return 0
