"""An order that cannot delay another beyond its deadline is accepted without a projection."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from sdxl import admission
from sdxl.admission import Admission, Refused
from sdxl.cost import NETWORKS, CostKey, Costs, all_ready_s, project
from sdxl.deepcache import plan
from sdxl.fairness import VirtualTime
from sdxl.flight import CallKey, Flight, Leg, Priority, State
from sdxl.policy import Limits
from tests.fakes import axes

BUCKETS = (1, 2, 4, 6, 8)
SMALL, LARGE = axes(16, 16), axes(32, 32)


def drawn_costs(rng: random.Random) -> Costs:
    """Draw arbitrary costs; a larger bucket may even cost less."""
    calls = [CallKey(network, sides) for network in NETWORKS for sides in (SMALL, LARGE)]
    ticks = {CostKey(call, b): rng.uniform(0.01, 1.0) for call in calls for b in BUCKETS}
    decode_s, paste_s, pasting_s = (rng.uniform(0.0, 0.5) for _ in range(3))
    return Costs(ticks, decode_s=decode_s, paste_s=paste_s, pasting_s=pasting_s)


def drawn_flight(rng: random.Random, number: int) -> Flight:
    steps = rng.randint(1, 8)
    guided = None if rng.random() < 0.7 else range(rng.randint(0, steps))
    flight = Flight(
        number,
        rng.choice([SMALL, LARGE]),
        plan(steps, rng.randint(1, 4), None, guided),
        priority=rng.choice(list(Priority)),
        deadline_s=rng.choice([math.inf, rng.uniform(1.0, 60.0)]),
        client=rng.choice("ab"),
        request_id=str(number),
        work_s=1.0,
        due=rng.uniform(0.0, 9.0),
        pasted=rng.choice([0.0, rng.uniform(0.0, 9.0)]),
    )
    if rng.random() < 0.3:
        later = Leg(LARGE, plan(rng.randint(1, 4), 2), rng.uniform(0.0, 1.0))
        flight = replace(flight, later=later)
    if rng.random() < 0.5:
        flight = replace(flight, step=rng.randint(0, steps - 1), state=State.RUNNING)
    return flight


def drawn(seed: int) -> Admission:
    rng = random.Random(seed)
    flights = [drawn_flight(rng, number) for number in range(rng.randint(1, 9))]
    limits = Limits(BUCKETS, rows=rng.choice([2, 4, 8]), crowded_rows=8)
    return Admission(flights, limits, drawn_costs(rng), now=rng.uniform(0.0, 1.0), delay_s=0.1)


@pytest.mark.parametrize("seed", range(300))
def test_no_picture_is_ready_later_than_the_bound(seed: int) -> None:
    case = drawn(seed)
    bound = all_ready_s(case.flights, case.limits, case.costs, case.now)
    last = max(project(case.flights, case.limits, case.costs, case.now).values())
    assert last <= bound + 1e-9, f"the last is ready at {last:.3f} s, the bound says {bound:.3f}"


def decided(case: Admission, newcomer: Flight) -> Flight | str:
    try:
        return case.admit(newcomer, VirtualTime())
    except Refused as refusal:
        return f"{refusal}, again in {refusal.retry_after_s:.6f}"


@pytest.mark.parametrize("seed", range(300))
def test_the_bound_admits_only_what_the_projection_admits(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = drawn(seed)
    newcomer = drawn_flight(random.Random(seed + 1000), 100)
    newcomer = replace(newcomer, step=0, state=State.QUEUED)
    short = decided(case, newcomer)
    monkeypatch.setattr(admission, "all_ready_s", lambda *_: math.inf)
    assert short == decided(case, newcomer)


def alike(number: int, deadline_s: float = 20.0) -> Flight:
    return Flight(number, SMALL, plan(20, 2), deadline_s=deadline_s, request_id=str(number))


def measured(seconds: float = 0.01) -> Costs:
    return Costs({CostKey(CallKey(n, SMALL), b): seconds for n in NETWORKS for b in BUCKETS})


@pytest.mark.parametrize(
    ("costs", "newcomer", "looks"),
    [
        pytest.param(measured(), alike(9), False, id="time for all"),
        pytest.param(measured(), alike(9, deadline_s=0.3), True, id="little time"),
        pytest.param(
            Costs(dict(list(measured().ticks.items())[:-1])), alike(9), True, id="unknown"
        ),
    ],
)
def test_orders_are_projected_only_where_one_may_be_late(
    costs: Costs, newcomer: Flight, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[object] = []

    def noted(*arguments: object) -> dict[int, float]:
        looked.append(arguments)
        return project(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(admission, "project", noted)
    case = Admission([alike(1), alike(2)], Limits(BUCKETS, rows=8), costs, now=0.0)
    case.admit(newcomer, VirtualTime())
    assert bool(looked) == looks
