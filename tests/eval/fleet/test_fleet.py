"""The simulated fleet: no picture is lost, both models agree, and the router beats its peers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from eval.fleet.command import FleetBench
from eval.fleet.flow import places_in_run
from eval.fleet.fronts import OURS, ROUND_ROBIN
from eval.fleet.gpus import SimulatedGpu
from eval.fleet.outcome import Outcome
from eval.fleet.scaling import ScaledFlow
from eval.fleet.ticks import TickFleet
from eval.fleet.traffic import DEADLINE_S, kinds, steady


@cache
def bench() -> FleetBench:
    return FleetBench(SimulatedGpu("h200"), load=0.8, seconds=20, price=3.0)


def no_more(_: float) -> float:
    return 0.0


def drained(flow: Any, seconds: float) -> Outcome:
    """Run for this time, then until all pictures are done."""
    out: Outcome = flow.run(seconds)
    object.__setattr__(flow.traffic, "level", no_more)
    for _ in range(2000):
        flow.advance()
    return out


@pytest.mark.parametrize("hours_to_failure", [np.inf, 0.02])
def test_every_picture_ends_or_is_refused(hours_to_failure: float) -> None:
    flow = bench().flow(12, hours_to_failure=hours_to_failure, cold_s=5.0)
    out = drained(flow, 20)
    assert out.finished + out.refused == out.arrived > 500
    assert not flow.running.any() and not flow.waiting.any() and not flow.later.size


def test_an_overloaded_fleet_refuses_and_keeps_its_deadlines() -> None:
    fleet = bench()
    flow = FleetBench(fleet.gpu, 2.0, 60, 3.0).flow(4)
    out = flow.run(60)
    assert out.refused > 0.1 * out.arrived and out.goodput < 0.95
    assert out.quantile(0.99) < 1.1 * DEADLINE_S


def test_both_models_of_a_replica_agree() -> None:
    fleet, files = bench(), np.zeros(0)
    flow = fleet.flow(4, files=files)
    flow.used_s[:] = 0.0
    ticks = TickFleet(fleet.gpu, flow.traffic, fleet.fronts(4, files=files))
    for replica in ticks.replicas:
        replica._loading_s = no_more  # type: ignore[method-assign,assignment]
    one, other = flow.run(20), ticks.run(20)
    assert one.arrived == other.arrived
    assert one.mean_s == pytest.approx(other.mean_s, rel=0.2)


def test_the_router_beats_round_robin() -> None:
    fleet = bench()
    ours, other = (fleet.flow(64, each).run(20).quantile(0.99) for each in (OURS, ROUND_ROBIN))
    assert ours < other


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_clusters_on_several_cores_are_the_whole_fleet() -> None:
    fleet = bench()
    whole = fleet.flow(750).run(fleet.long_enough_s(750))
    total = Outcome()
    for out, cpu_s in fleet._parts(750):
        assert cpu_s > 0
        total.add(out)
    assert total.gpu_s == pytest.approx(whole.gpu_s)
    # Both numbers have Poisson's deviation.
    assert abs(total.arrived - whole.arrived) < 6 * (2 * whole.arrived) ** 0.5


def test_replicas_follow_the_load() -> None:
    fleet = bench()
    flow = fleet.flow(64, cold_s=5.0)
    scaled = ScaledFlow(flow, begin=8)
    scaled.run(60)
    assert 48 <= scaled.active <= 64


def test_the_kinds_are_all_requests_and_a_standard_picture_costs_as_measured() -> None:
    assert sum(kind.share for kind in kinds()) == pytest.approx(1)
    gpu = bench().gpu
    assert 1 / gpu.costs.work_s(gpu.standard, gpu.limits) == pytest.approx(4.8, rel=0.02)
    assert steady(3.0) == 1.0


def test_the_place_among_equals() -> None:
    assert places_in_run(np.array([3, 3, 5, 7, 7, 7])).tolist() == [0, 1, 0, 0, 1, 2]
    assert places_in_run(np.array([], int)).tolist() == []
