"""In simulated time under load, the policy's p99 is no higher than that of static batchers.

A device has the costs below. Both serve the same Poisson arrivals. A static batch runs as long as
its longest request. It holds any requests, or equal requests, and has the best size and wait for
the load.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest

from sdxl import deepcache
from sdxl.cost import CostKey, Costs
from sdxl.flight import CallKey, Flight, Network, State
from sdxl.policy import Group, Limits, plan_tick
from tests.fakes import axes

BUCKETS = (2, 4, 6, 8, 10, 12, 14, 16)
SECONDS: dict[Network, tuple[float, float]] = {
    "unet_deep": (3.0e-3, 1.83e-3),
    "unet_shallow": (0.5e-3, 0.24e-3),
}
"""seconds of a call and of each of its rows, measured on two cores"""
Kind = tuple[int, int]
"""steps and cache interval"""
MIXES: dict[str, tuple[Kind, ...]] = {
    "all of medium quality": ((20, 2),),
    "10 exact steps, 20 or 30 at interval 2": ((10, 1), (20, 2), (30, 2)),
    "10, 20 or 40 steps": ((10, 2), (20, 2), (40, 2)),
}
IMAGE = Flight(-1, axes(16, 16), deepcache.plan(1, 1))
COSTS = Costs(
    {
        CostKey(CallKey(network, IMAGE.axes), rows): fixed + each * rows
        for network, (fixed, each) in SECONDS.items()
        for rows in BUCKETS
    }
)
LIMITS = replace(
    Limits(BUCKETS, BUCKETS[-1]),
    rows=COSTS.knee(IMAGE, BUCKETS),
    crowded_rows=COSTS.knee(IMAGE, BUCKETS, tolerance=0.0),
)
WARM_SHARE = 0.1
WAITS = (0.0, 0.25, 0.5, 1.0)
"""the waits, as shares of one image's time"""


class Arrival(NamedTuple):
    at_s: float
    kind: Kind


@cache
def batch_s(images: int, kind: Kind) -> float:
    """Seconds of all steps of a static batch."""
    calls = (
        IMAGE.call("unet_deep" if s.is_deep else "unet_shallow") for s in deepcache.plan(*kind)
    )
    return sum(COSTS.tick_s(Group(call, (), LIMITS.bucket(2 * images))) for call in calls)


def capacity(mix: Sequence[Kind]) -> float:
    """Images a second with the best batch size, full batches, and one kind in each batch."""
    return max(n / statistics.fmean(batch_s(n, kind) for kind in mix) for n in range(1, 9))


def draw_arrivals(rate: float, mix: Sequence[Kind], count: int) -> list[Arrival]:
    rng, now, arrivals = random.Random(1), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        arrivals.append(Arrival(now, rng.choice(mix)))
    return arrivals


def serve_in_flight(arrivals: Sequence[Arrival]) -> list[float]:
    latencies, flights = [0.0] * len(arrivals), dict[int, Flight]()
    now, coming = 0.0, 0
    while coming < len(arrivals) or flights:
        if not flights:
            now = max(now, arrivals[coming].at_s)
        while coming < len(arrivals) and arrivals[coming].at_s <= now:
            plan = deepcache.plan(*arrivals[coming].kind)
            flights[coming] = Flight(coming, IMAGE.axes, plan)
            coming += 1
        tick = plan_tick(list(flights.values()), LIMITS, now)
        for id_ in tick.admitted:
            flights[id_] = replace(flights[id_], state=State.RUNNING)
        now += sum(COSTS.tick_s(group) for group in tick.groups)
        for id_ in (id_ for group in tick.groups for id_ in group.ids):
            flights[id_] = flights[id_].advanced()
            if flights[id_].is_done:
                latencies[id_] = now - arrivals[id_].at_s
                del flights[id_]
    return latencies


def serve_static(
    arrivals: Sequence[Arrival], most: int, wait_s: float, is_alike: bool
) -> list[float]:
    """A batch starts when it is full or its first request has waited `wait_s`."""
    latencies, waiting, now = [0.0] * len(arrivals), list(range(len(arrivals))), 0.0
    while waiting:
        first = arrivals[waiting[0]]
        fitting = (i for i in waiting if not is_alike or arrivals[i].kind == first.kind)
        candidates = list(itertools.islice(fitting, most))
        full_s = arrivals[candidates[-1]].at_s if len(candidates) == most else math.inf
        now = max(now, min(full_s, first.at_s + wait_s))
        batch = [i for i in candidates if arrivals[i].at_s <= now]
        now += max(batch_s(len(batch), kind) for kind in {arrivals[i].kind for i in batch})
        for i in batch:
            latencies[i] = now - arrivals[i].at_s
            waiting.remove(i)
    return latencies


def p99(latencies: Sequence[float]) -> float:
    settled = sorted(latencies[int(len(latencies) * WARM_SHARE) :])
    return settled[math.ceil(0.99 * len(settled)) - 1]


def test_calls_are_full_only_while_many_wait() -> None:
    assert (LIMITS.rows, LIMITS.crowded_rows) == (14, 16)


MIXED = "10 exact steps, 20 or 30 at interval 2"


@pytest.mark.parametrize(
    ("mix", "load", "images"),
    [
        pytest.param(MIXED, 0.95, 500),
        *(
            pytest.param(
                mix, load, 2000, marks=pytest.mark.slow if load == 0.8 else pytest.mark.long
            )
            for mix in MIXES
            for load in (0.5, 0.8, 0.95)
        ),
    ],
)
def test_the_p99_in_flight_is_no_higher_than_the_best_static_one(
    mix: str, load: float, images: int
) -> None:
    arrivals = draw_arrivals(load * capacity(MIXES[mix]), MIXES[mix], images)
    waits_s = [share * batch_s(1, (20, 2)) for share in WAITS]
    statics = {
        each: p99(serve_static(arrivals, *each))
        for each in itertools.product(range(1, 9), waits_s, (False, True))
    }
    assert p99(serve_in_flight(arrivals)) <= min(statics.values()), statics
