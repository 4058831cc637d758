"""Low priority beside interactive load, in simulated time with the real admission and policy."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from sdxl.flight import Priority
from tests.sdxl.sharing import STANDARD, Caller, Device, World, device_costs, quantile

ROWS, STEPS = 4, 20
BASE_S, ROW_S, SHALLOW_SHARE = 0.006, 0.012, 0.1
"""The device computes rows one by one, so more rows cost more."""
LOAD, ARRIVALS = 0.6, 400
LOW = "low priority"


def simulated(has_low: bool) -> tuple[list[float], Device]:
    """Return the latencies of interactive pictures, which arrive at random. The load is 60% of what
    the device makes in full calls."""
    device = Device(ROWS, costs=device_costs(BASE_S, ROW_S))
    world, latencies = World([device]), list[float]()
    pair_s = (1 + SHALLOW_SHARE) * (BASE_S + ROW_S * ROWS)
    images_per_s = (ROWS // 2) / (pair_s * STEPS / 2)
    chance, now = random.Random(7), 0.0

    def arrive(at_s: float) -> None:
        wanted = replace(STANDARD, client="interactive")
        device.submit(wanted, lambda is_done: latencies.append(world.now - at_s))

    for _ in range(ARRIVALS):
        now += chance.expovariate(LOAD * images_per_s)
        world.at(now, lambda at_s=now: arrive(at_s))  # type: ignore[misc]
    if has_low:
        Caller(world, LOW, connections=16, priority=Priority.BATCH, deadline_s=math.inf)
    while len(latencies) < ARRIVALS:
        world.run(world.now + 1.0)
    return latencies, device


@pytest.mark.slow
def test_interactive_latency_hardly_grows_and_low_priority_fills_idle_ticks() -> None:
    (alone, idle), (beside, busy) = simulated(has_low=False), simulated(has_low=True)
    before, after = quantile(alone, 0.99), quantile(beside, 0.99)
    grown = after / before - 1
    assert grown <= 0.15, f"p99 from {before:.3f} to {after:.3f} s: +{grown:.1%}, allowed +15%"
    used = busy.worked[LOW] / idle.idle_s
    assert used >= 0.8, f"{used:.1%} of the idle time was used, needed 80%"
