"""In simulated time, clients share a device by work: no client can take the others' share, and low
priority gets the time that nobody else uses."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from sdxl.admission import Refused
from sdxl.deepcache import plan
from sdxl.fairness import VirtualTime
from sdxl.flight import Flight, Priority, State
from sdxl.policy import Limits, plan_tick
from tests.fakes import axes
from tests.sdxl.sharing import SHAPE, STANDARD, Caller, Device, World, device_costs, quantile

FLOOD: dict[str, Any] = {"connections": 40, "n": 10, "steps": 30}


def light(world: World) -> Caller:
    chance = random.Random(3)
    return Caller(world, "light", pause_s=lambda: 1.5 * chance.uniform(0.5, 1.5))


def kept(world: World) -> None:
    broken = [each for device in world.devices for each in device.broken]
    assert not broken, f"promised and late: {broken}"


@pytest.mark.parametrize("rows", [2, 4, 12])
def test_a_flood_leaves_a_light_client_its_latency_and_refuses_it_nothing(rows: int) -> None:
    quiet, busy = World([Device(rows, queue=12)]), World([Device(rows, queue=12)])
    alone, beside = light(quiet), light(busy)
    flood = Caller(busy, "flood", **FLOOD, begins_s=2.0)
    for world in (quiet, busy):
        world.run(20.0)
    before, after = (quantile(each.latencies, 0.99) for each in (alone, beside))
    assert flood.refused > 0 and flood.images > 0
    assert beside.refused == 0
    assert after <= 2.01 * before, f"p99 from {before:.3f} to {after:.3f} s: needed twice at most"
    kept(busy)


@pytest.mark.parametrize(("weight", "within"), [(1.0, 0.05), (2.0, 0.10)])
@pytest.mark.parametrize("rows", [2, 8])
def test_floods_get_work_by_their_weights(rows: int, weight: float, within: float) -> None:
    world = World([Device(rows, queue=12)])
    Caller(world, "one", **FLOOD, weight=weight, deadline_s=math.inf)
    Caller(world, "other", connections=40, n=4, steps=12, deadline_s=math.inf)
    world.run(60.0)
    worked = world.devices[0].worked
    ratio = worked["one"] / worked["other"]
    assert ratio == pytest.approx(weight, rel=within), f"{ratio:.3f} : 1, needed {weight} : 1"
    kept(world)


@pytest.mark.slow
def test_two_independent_replicas_give_equal_shares() -> None:
    world = World([Device(4, queue=12), Device(4, queue=12)])
    Caller(world, "one", connections=8, n=10, steps=30, deadline_s=math.inf)
    Caller(world, "other", connections=8, n=4, steps=12, deadline_s=math.inf)
    beside = light(world)
    world.run(40.0)
    worked = {
        name: sum(device.worked.get(name, 0.0) for device in world.devices)
        for name in ("one", "other")
    }
    ratio = worked["one"] / worked["other"]
    assert ratio == pytest.approx(1.0, rel=0.05), f"{ratio:.3f} : 1 of work, needed 1 : 1"
    assert beside.refused == 0
    kept(world)


def test_a_lone_flood_leaves_the_device_never_idle() -> None:
    world = World([Device(8, queue=12)])
    Caller(world, "flood", **FLOOD)
    world.run(10.0)
    assert world.devices[0].idle_s == 0
    kept(world)


def test_a_large_request_is_not_starved_by_many_small_ones() -> None:
    world = World([Device(4)])
    small = [
        Caller(world, f"small {i}", connections=3, steps=4, deadline_s=math.inf) for i in range(6)
    ]
    large = Caller(world, "large", steps=100, deadline_s=math.inf, begins_s=1.0)
    world.run(30.0)
    alone_s = 50 * 0.030 + 50 * 0.003
    fair_s = (len(small) + 1) * alone_s
    assert large.images > 0 and max(large.latencies) <= 1.2 * fair_s, (
        f"{max(large.latencies, default=60):.1f} s; alone {alone_s:.1f}, by its share {fair_s:.1f}"
    )


def test_later_requests_do_not_break_a_promise() -> None:
    """Later come a batch without a deadline, a flood, and one new client after another."""
    world = World([Device(8, queue=12)])
    Caller(world, "night", connections=4, priority=Priority.BATCH, deadline_s=math.inf)
    Caller(world, "flood", connections=4, n=10, steps=30, deadline_s=8.0)
    for i in range(8):
        Caller(world, f"later {i}", 2, 2, begins_s=2.0 + i, deadline_s=6.0)
    world.run(12.0)
    kept(world)


def test_no_image_overtakes_one_that_would_then_be_late() -> None:
    device = Device(rows=2)
    wanted = replace(STANDARD, client="first", deadline_s=0.35)
    device.submit(wanted, lambda is_done: None)
    device.tick()
    ended: list[str] = []
    device.on_end[0] = lambda is_done: ended.append("first")
    short = replace(wanted, client="later", deadline_s=9.0, plan=plan(1, 1))
    later = device.submit(short, lambda is_done: ended.append("later"))
    assert device.flights[later].is_last, "alone it would pause the first, which has no time"
    while len(ended) < 2:
        device.tick()
    assert ended == ["first", "later"] and not device.broken


def test_a_client_takes_half_of_the_queue_at_most_and_the_next_finds_room() -> None:
    device = Device(rows=2, queue=10)
    flood = replace(STANDARD, client="flood", plan=plan(40, 1))

    def take(wanted: Flight) -> int:
        count = 0
        try:
            while True:
                device.submit(wanted, lambda is_done: None)
                count += 1
        except Refused as refusal:
            assert refusal.reason == "queue_full"
        return count

    of_flood = take(flood)
    assert of_flood == 3, "four standard images each: the third begins below ten"
    assert take(replace(STANDARD, client="light")) >= 4


def test_an_idle_client_saves_no_credit_and_a_cancelled_image_costs_none() -> None:
    time = VirtualTime()
    busy = time.stamped(replace(STANDARD, id=1, client="busy", work_s=10.0), [])
    queued = time.stamped(replace(STANDARD, id=2, client="busy", work_s=10.0), [busy])
    running = replace(busy, step=10, state=State.RUNNING)
    fresh = time.stamped(replace(STANDARD, id=3, client="new", work_s=1.0), [running, queued])
    assert (busy.due, queued.due, fresh.due) == (10.0, 20.0, 6.0)
    third = time.stamped(replace(STANDARD, id=4, client="busy", work_s=10.0), [running, queued])
    (moved,) = time.leave(queued, [running, third])
    assert (moved.id, moved.due) == (4, 20.0)


def test_a_client_above_its_share_pauses_one_image_for_a_newcomer() -> None:
    limits = Limits(buckets=(2, 4), rows=4)
    heavy = [
        Flight(i, SHAPE, plan(9, 1), 2, state=State.RUNNING, client="heavy", due=i)
        for i in range(2)
    ]
    newcomer = Flight(7, axes(8, 8), plan(9, 1), client="light", due=99.0)
    decided = plan_tick([*heavy, newcomer], limits, 0.0)
    assert (decided.paused, decided.admitted) == ((1,), (7,))
    paused = replace(heavy[1], state=State.PAUSED)
    flying = replace(newcomer, state=State.RUNNING)
    again = plan_tick([heavy[0], paused, flying], limits, 0.0)
    assert (again.paused, again.resumed) == ((), ()), "and it stays so"


# -- low priority -------------------------------------------------------------------------

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
