"""An upscaled picture has two legs. Both are in the ETA, counted and queued from the beginning."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sdxl.admission import Admission, Refused
from sdxl.cost import CostKey, Costs, project
from sdxl.deepcache import plan
from sdxl.fairness import VirtualTime, begin, left_of
from sdxl.flight import CallKey, Flight, Leg, State
from sdxl.policy import Limits
from tests.fakes import axes
from tests.sdxl.sharing import SHAPE as OF_THE_DEVICE
from tests.sdxl.sharing import Caller, Device, World
from tests.sdxl.test_fairness import kept

SMALL, LARGE = axes(8, 8), axes(16, 16)
ONE = Flight(0, SMALL, plan(6, 1))
LATER = Leg(LARGE, plan(4, 1), delay_s=0.5)
BOTH = replace(ONE, later=LATER)
LIMITS = Limits(buckets=(2,), rows=2, standard=ONE)
COSTS = Costs(
    {CostKey(CallKey("unet_deep", SMALL), 2): 1.0, CostKey(CallKey("unet_deep", LARGE), 2): 5.0},
    decode_s=0.1,
)
WORK_S = 6 * 1.0 + 0.5 + 4 * 5.0


def test_a_promise_includes_both_legs_and_the_work_between_them() -> None:
    """Decoding counts by the size of the decoded picture."""
    found = project([ONE], LIMITS, COSTS, 10.0)
    assert found[0] == pytest.approx(10.0 + 6 * 1.0 + 0.1)
    found = project([BOTH], LIMITS, COSTS, 10.0)
    assert found[0] == pytest.approx(10.0 + WORK_S + 4 * 0.1)


def test_pictures_are_pasted_one_after_another() -> None:
    """A finished picture is pasted into a larger image after earlier finished pictures."""
    costs = replace(COSTS, paste_s=2.0, pasting_s=7.0)
    flights = [replace(ONE, id=0, pasted=3.0), replace(ONE, id=1, pasted=3.0), replace(ONE, id=2)]
    ready = project(flights, LIMITS, costs, 0.0)
    assert ready == pytest.approx({0: 7.0 + 6.0, 1: 13.0 + 6.0, 2: 18.0 + 0.1})
    assert costs.work_s(flights[0], LIMITS) == costs.work_s(flights[2], LIMITS) + 6.0


def test_a_later_request_waits_for_both_legs() -> None:
    after = replace(ONE, id=1)
    found = project([BOTH, after], LIMITS, COSTS, 0.0)
    # The time between the legs is not the loop's: another picture's first leg could run in it.
    assert found[1] == pytest.approx(6 + 4 * 5.0 + 6 + 0.1)


def test_both_legs_are_the_client_s_work() -> None:
    taken = Admission((), LIMITS, COSTS, 0.0).admit(BOTH, VirtualTime())
    assert taken.work_s == pytest.approx(WORK_S) and taken.later is not None
    assert taken.later.work_s == pytest.approx(WORK_S - 6)
    assert taken.images == pytest.approx(WORK_S / 6)
    assert taken.due == pytest.approx(WORK_S)


def test_nothing_of_the_work_is_lost_or_counted_twice_between_the_legs() -> None:
    taken = Admission((), LIMITS, COSTS, 0.0).admit(BOTH, VirtualTime())
    first = replace(taken, step=6, state=State.RUNNING)
    then = first.next_leg
    assert left_of(taken) == taken.work_s
    assert left_of(first) == pytest.approx(then.work_s) == pytest.approx(left_of(then))
    assert (then.due, then.id, then.state, then.later) == (taken.due, 0, State.QUEUED, None)
    assert begin(then) == pytest.approx(begin(taken) + 6)
    assert (taken.steps_left, first.steps_left, then.steps_left) == (10, 4, 4)


def test_other_requests_of_a_client_move_up_only_when_a_leg_is_cancelled() -> None:
    time = VirtualTime()
    taken = Admission((), LIMITS, COSTS, 0.0).admit(BOTH, time)
    behind = replace(ONE, id=1, due=taken.due + 6, work_s=6.0)
    assert time.leave(replace(taken, step=6), [behind]) == []
    (moved,) = time.leave(replace(taken, step=3), [behind])
    assert moved.due == pytest.approx(behind.due - (WORK_S - 3))


def test_a_deadline_that_only_the_first_leg_would_meet_is_refused() -> None:
    admission = Admission((), LIMITS, COSTS, 0.0)
    admission.admit(replace(ONE, deadline_s=7.0), VirtualTime())
    with pytest.raises(Refused, match="ready in 26.9"):
        admission.admit(replace(BOTH, deadline_s=7.0), VirtualTime())


def test_upscaled_and_plain_pictures_share_a_device_by_work() -> None:
    """Every ETA holds, although half of the pictures have two legs."""
    world = World([Device(4, queue=12)])
    wide = Leg(axes(128, 128), plan(8, 2))
    Caller(world, "plain", connections=8, n=4, deadline_s=math.inf, axes=OF_THE_DEVICE)
    Caller(world, "upscaled", connections=8, n=4, deadline_s=math.inf, later=wide)
    Caller(world, "in a hurry", connections=2, later=wide, deadline_s=9.0, begins_s=3.0)
    world.run(60.0)
    worked = world.devices[0].worked
    ratio = worked["upscaled"] / worked["plain"]
    assert ratio == pytest.approx(1, rel=0.1), f"{ratio:.3f} : 1, needed 1 : 1"
    kept(world)
