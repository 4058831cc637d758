"""Low priority beside interactive load, in simulated time with the real loop and policy."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from sdxl import deepcache, schedulers
from sdxl.flight import Priority
from sdxl.inflight import Finished, InFlight, Request
from sdxl.policy import Limits
from sdxl.schedulers import SchedulerConfig
from tests.fakes import FakeClock, FakeEngine, fake_conditioning, fake_engines

ROWS, BUCKETS = 4, (1, 2, 4)
STEPS, DEEP_S, SHALLOW_S = 20, 0.030, 0.003
"""Seconds of a tick of two rows. The device computes rows one by one, so more rows cost more."""
LOAD, ARRIVALS = 0.6, 400
QUEUED_LOW = 16


def cost_s(network: str, rows: int) -> float:
    return (DEEP_S if network == "unet_deep" else SHALLOW_S) * (0.2 + 0.4 * rows)


@dataclass
class Simulation:
    """Requests arrive at random; time passes only in engine calls, or until the next arrival."""

    has_low: bool
    clock: FakeClock = field(default_factory=FakeClock)
    latencies: list[float] = field(default_factory=list)
    low_s: float = 0.0
    idle_s: float = 0.0
    low_done: int = 0

    def __post_init__(self) -> None:
        engines = fake_engines(BUCKETS)
        for name in ("unet_deep", "unet_shallow"):
            engine = engines[name]
            assert isinstance(engine, FakeEngine)
            engine.on_call = lambda name=name, engine=engine: self._pass(name, engine)  # type: ignore[misc]
        self.loop = InFlight(engines, self.clock, Limits(BUCKETS, ROWS))
        self.table = schedulers.table("euler", STEPS, SchedulerConfig())
        self.plan = deepcache.plan(STEPS, 2)
        self._low: set[int] = set()

    def _pass(self, network: str, engine: FakeEngine) -> None:
        self.clock.now += cost_s(network, engine.calls[-1]["sample"][0])
        engine.calls.clear()

    def submit(self, seed: int, priority: Priority) -> int:
        conditioning = fake_conditioning(seed, 2)
        request = Request(conditioning, self.table, self.plan, 5.0, seed, 8, 8, priority)
        return self.loop.submit(request)

    def run(self, arrivals: list[float]) -> None:
        due, came = list(arrivals), dict[int, float]()
        while due or came:
            while due and due[0] <= self.clock.now:
                at = due.pop(0)
                came[self.submit(len(due), Priority.INTERACTIVE)] = at
            while self.has_low and len(self._low) < QUEUED_LOW:
                self._low.add(self.submit(10_000 + self.low_done, Priority.BATCH))
            if self.loop.is_idle:
                self.idle_s += due[0] - self.clock.now
                self.clock.now = due[0]
                continue
            began, has_urgent = self.clock.now, bool(came)
            for event in self.loop.tick():
                assert isinstance(event, Finished)
                if event.id in came:
                    self.latencies.append(self.clock.now - came.pop(event.id))
                else:
                    self._low.discard(event.id)
                    self.low_done += 1
            if not has_urgent:
                self.low_s += self.clock.now - began


def arrivals() -> list[float]:
    """The load is 60% of what the device makes in full calls."""
    pair = cost_s("unet_deep", ROWS) + cost_s("unet_shallow", ROWS)
    images_per_s = (ROWS // 2) / (pair * STEPS / 2)
    chance, now, times = random.Random(7), 0.0, []
    for _ in range(ARRIVALS):
        now += chance.expovariate(LOAD * images_per_s)
        times.append(now)
    return times


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


@pytest.fixture(scope="module")
def simulated() -> tuple[Simulation, Simulation]:
    alone, beside = Simulation(has_low=False), Simulation(has_low=True)
    for simulation in (alone, beside):
        simulation.run(arrivals())
    return alone, beside


@pytest.mark.slow
def test_interactive_latency_hardly_grows(simulated: tuple[Simulation, Simulation]) -> None:
    alone, beside = simulated
    before, after = (quantile(each.latencies, 0.99) for each in simulated)
    assert len(alone.latencies) == len(beside.latencies) == ARRIVALS
    grown = after / before - 1
    assert grown <= 0.15, f"p99 from {before:.3f} to {after:.3f} s: +{grown:.1%}, allowed +15%"


@pytest.mark.slow
def test_low_priority_fills_idle_ticks(simulated: tuple[Simulation, Simulation]) -> None:
    alone, beside = simulated
    used = beside.low_s / alone.idle_s
    assert used >= 0.8, f"{used:.1%} of the idle time was used, needed 80%"
    assert beside.low_done > 0
