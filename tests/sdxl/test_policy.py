"""The policy's decisions, one by one, on plain data."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdxl.cost import SHALLOW_SHARE, CostKey, Costs, project, smoothed
from sdxl.deepcache import Step, plan
from sdxl.flight import PLAIN, CallKey, Flight, Leg, Priority, State, Variant
from sdxl.policy import PATIENCE, Group, Limits, plan_tick
from tests.fakes import axes

SHAPE, WIDE = axes(8, 8), axes(8, 16)
LIMITS = Limits(buckets=(1, 2, 4, 8), rows=8)
RUNNING = State.RUNNING
UNGUIDED = plan(6, 2, guided_steps=())


def flight(id_: int, step: int = 0, interval: int = 2, **rest: object) -> Flight:
    fields: dict[str, object] = {"axes": SHAPE, "plan": plan(6, interval), **rest}
    return Flight(id_, step=step, **fields)  # type: ignore[arg-type]


def groups(*flights: Flight, limits: Limits = LIMITS) -> list[tuple[str, tuple[int, ...], int]]:
    found = plan_tick(flights, limits, 0.0).groups
    return [(g.network.removeprefix("unet_"), g.ids, g.bucket) for g in found]


def test_rows_that_need_the_same_share_one_call() -> None:
    flights = [
        flight(0, 0, state=RUNNING),
        flight(1, 1, 6, state=RUNNING),
        flight(2, 2, state=RUNNING),
        flight(3, 0, state=RUNNING, axes=WIDE, plan=UNGUIDED),
    ]
    assert groups(*flights) == [("deep", (0, 2), 4), ("shallow", (1,), 2), ("deep", (3,), 1)]


def test_a_group_larger_than_the_largest_bucket_is_split_without_losing_one() -> None:
    flights = [flight(i, state=RUNNING) for i in range(7)]
    limits = Limits(buckets=(2, 4), rows=14)
    assert [g[1] for g in groups(*flights, limits=limits)] == [(0, 1), (2, 3), (4, 5), (6,)]


def test_admission_is_in_order_and_nothing_overtakes_what_does_not_fit() -> None:
    flights = [flight(0, 2, state=RUNNING), flight(1), flight(2, plan=UNGUIDED)]
    assert plan_tick(flights, Limits(buckets=(8,), rows=3), 0.0).admitted == ()
    alone = [flight(1), flight(2, plan=UNGUIDED)]
    assert plan_tick(alone, Limits(buckets=(8,), rows=1), 0.0).admitted == (1,)


@pytest.mark.parametrize(
    ("steps_to_deep", "stepping"), [(1, (1,)), (PATIENCE, (1,)), (PATIENCE + 1, (0, 1))]
)
def test_a_deep_step_waits_for_those_about_to_reach_theirs(
    steps_to_deep: int, stepping: tuple[int, ...]
) -> None:
    almost = flight(1, 5 - steps_to_deep, plan=plan(9, 5), state=RUNNING)
    found = groups(flight(0, 2, state=RUNNING), almost)
    assert tuple(sorted(id_ for _, ids, _ in found for id_ in ids)) == stepping


def test_images_do_not_wait_for_other_sizes_or_last_steps() -> None:
    found = groups(
        flight(0, 2, state=RUNNING),
        flight(1, 1, axes=WIDE, state=RUNNING),
        flight(2, 5, state=RUNNING),
    )
    assert [ids for _, ids, _ in found] == [(0,), (1,), (2,)]


def test_a_newcomer_waits_for_the_next_deep_step_and_keeps_its_place() -> None:
    runner, limits = flight(0, 1, state=RUNNING), Limits(buckets=(8,), rows=6)
    queued = [flight(1), flight(2, interval=3), flight(3)]
    assert plan_tick([runner, *queued], limits, 0.0).admitted == ()
    assert plan_tick([runner, flight(4, axes=WIDE)], limits, 0.0).admitted == (4,)
    runner = runner.advanced()
    assert plan_tick([runner, *queued], limits, 0.0).admitted == (1, 2)


@pytest.mark.parametrize("running", [0, 1, 2])
@pytest.mark.parametrize(("asked", "in_flight"), [(3, 2), (4, 4)])
def test_once_what_is_asked_for_fills_a_call_it_is_full(
    running: int, asked: int, in_flight: int
) -> None:
    limits = replace(LIMITS, rows=4, crowded_rows=8)
    flights = [flight(i, state=RUNNING if i < running else State.QUEUED) for i in range(asked)]
    assert running + len(plan_tick(flights, limits, 0.0).admitted) == in_flight


def test_batch_pauses_for_interactive_and_resumes_before_new_batch_work() -> None:
    batch = flight(0, 2, state=RUNNING, priority=Priority.BATCH)
    found = plan_tick([batch, flight(1)], LIMITS, 0.0)
    assert (found.paused, found.admitted) == ((0,), (1,))
    paused = flight(5, 2, state=State.PAUSED, priority=Priority.BATCH)
    new = flight(4, priority=Priority.BATCH)
    found = plan_tick([new, paused], Limits(buckets=(2,), rows=2), 0.0)
    assert (found.resumed, found.admitted) == ((5,), ())


def test_a_later_leg_has_its_rows_again_before_images_of_its_client_that_came_later() -> None:
    first = flight(0, client="a", later=Leg(WIDE, plan(4, 1)))
    came = [flight(i, state=RUNNING, client="a", due=float(i)) for i in (1, 2)]
    limits = Limits(buckets=(2, 4), rows=4)
    assert plan_tick([*came, first], limits, 0.0).admitted == ()
    found = plan_tick([*came, first.next_leg], limits, 0.0)
    assert (found.admitted, found.paused) == ((0,), (2,))


def test_caches_of_all_priorities_count_for_the_cap() -> None:
    batch = [
        flight(i, 1, state=state, priority=Priority.BATCH)
        for i, state in enumerate((State.PAUSED, State.PAUSED, RUNNING))
    ]
    limits = Limits(buckets=(2,), rows=2, paused_cache_rows=4)
    found = plan_tick([*batch, flight(3, client="a")], limits, 0.0)
    assert (found.admitted, found.paused) == ((), ())


@pytest.mark.parametrize(("cap", "paused"), [(0, ()), (2, (0,)), (4, (0, 1))])
def test_caches_that_wait_are_capped(cap: int, paused: tuple[int, ...]) -> None:
    batch = [flight(i, 1, state=RUNNING, priority=Priority.BATCH) for i in range(2)]
    limits = Limits(buckets=(8,), rows=8, paused_cache_rows=cap)
    assert plan_tick([*batch, flight(2)], limits, 0.0).paused == paused


def test_plans() -> None:
    deep, shallow = Step(is_deep=True), Step(is_deep=False)
    assert plan(5, 2) == (deep, shallow, deep, shallow, deep)
    assert plan(3, 1) == (deep, deep, deep)
    assert plan(4, 9, deep_steps=(0, 3)) == (deep, shallow, shallow, deep)
    assert plan(2, 2, guided_steps=()) == (Step(True, False), Step(False, False))


@pytest.mark.parametrize(
    ("rides", "needed"),
    [
        (False, [PLAIN, Variant("lora", 2), Variant("locon", 1)]),
        (True, [Variant("locon", 2)]),
    ],
)
def test_images_with_other_loras_share_calls_only_if_they_ride(
    rides: bool, needed: list[Variant]
) -> None:
    variants = (PLAIN, Variant("lora", 2), Variant("locon", 1))
    flights = [flight(i, variant=each, rides=rides) for i, each in enumerate(variants)]
    calls = [group.call.variant for group in plan_tick(flights, LIMITS, 0.0).groups]
    assert calls == needed


def test_a_shallow_step_needs_only_loras_of_its_own_layers() -> None:
    assert Variant("lora", 2).of("unet_shallow") == PLAIN
    assert Variant("locon", 2).of("unet_shallow") == Variant("locon", 2)


def test_buckets_must_hold_a_guided_image() -> None:
    with pytest.raises(ValueError, match="buckets"):
        Limits(buckets=(1,), rows=1)


def costs(per_bucket: dict[int, float]) -> Costs:
    return Costs({CostKey(CallKey("unet_deep", SHAPE), b): c for b, c in per_bucket.items()})


def test_the_knee_is_where_more_rows_stop_paying() -> None:
    buckets = (1, 2, 4, 8)
    assert costs({1: 1.0, 2: 1.1, 4: 1.2, 8: 2.4}).knee(flight(0), buckets) == 4
    assert costs({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}).knee(flight(0), buckets) == 1
    assert Costs().knee(flight(0), buckets) == 8


def test_unmeasured_costs_scale_from_the_nearest() -> None:
    known = costs({2: 1.0})
    assert known.tick_s(Group(CallKey("unet_deep", SHAPE), (0,), 4)) == pytest.approx(2.0)
    assert known.tick_s(Group(CallKey("unet_deep", WIDE), (0,), 2)) == pytest.approx(2.0)
    assert known.tick_s(Group(CallKey("unet_shallow", SHAPE), (0,), 2)) == pytest.approx(
        SHALLOW_SHARE
    )


def test_costs_of_many_sizes_are_forgotten_but_for_the_warm_ups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 50
    monkeypatch.setattr("sdxl.cost.MOST_TICKS", most)
    known = costs({1: 0.5, 2: 0.7})
    known.lasting = frozenset(known.ticks)
    sides = range(1, 2 * most)
    for side in sides:
        known.observe(Group(CallKey("unet_deep", axes(side, 8)), (0,), 4), 1.0)
    assert len(known.ticks) == most and known.lasting <= known.ticks.keys()
    newest = CostKey(CallKey("unet_deep", axes(sides[-1], 8)), 4)
    assert newest in known.ticks, "the newest stay"


def test_one_slow_tick_does_not_spoil_the_mean() -> None:
    assert smoothed(1.0, 100.0) == pytest.approx(1.2)


def test_a_first_measurement_counts_at_most_twice_the_estimate() -> None:
    """The first call of a size may run while many prompts are encoded."""
    known = costs({2: 1.0})
    wide = Group(CallKey("unet_deep", WIDE), (0,), 2)
    known.observe(wide, 20.0)
    assert known.tick_s(wide) == pytest.approx(2 * 2.0)
    shallow = Group(CallKey("unet_shallow", SHAPE), (0,), 2)
    known.observe(shallow, 20.0)
    assert known.tick_s(shallow) == 20.0, "nothing is known of this network"


def tick_by_tick(
    flights: list[Flight], limits: Limits, known: Costs, now: float
) -> dict[int, float]:
    """A plain `project`: run the whole policy for all images at every tick."""
    states = {f.id: f for f in flights}
    finish = {f.id: math.inf for f in flights}
    while (found := plan_tick(list(states.values()), limits, now)).groups:
        for ids, state in (
            ((*found.admitted, *found.resumed), RUNNING),
            (found.paused, State.PAUSED),
        ):
            for id_ in ids:
                states[id_] = replace(states[id_], state=state)
        now += sum(known.tick_s(group) for group in found.groups)
        for id_ in (id_ for group in found.groups for id_ in group.ids):
            states[id_] = replace(states[id_], step=states[id_].step + 1)
            if states[id_].is_done and states[id_].later:
                states[id_] = states[id_].next_leg
            elif states[id_].is_done:
                finish[id_] = now + known.decode_s
                del states[id_]
    return finish


@st.composite
def any_flight(draw: st.DrawFn) -> Flight:
    steps = draw(st.integers(1, 9))
    guided = draw(st.sets(st.integers(0, steps - 1)) | st.none())
    refined_from = draw(st.none() | st.integers(1, steps))
    made = plan(steps, draw(st.integers(1, 4)), None, guided, refined_from)
    state = draw(st.sampled_from(State))
    later = Leg(WIDE, plan(draw(st.integers(1, 5)), draw(st.integers(1, 3))))
    return Flight(
        0,
        draw(st.sampled_from((SHAPE, WIDE))),
        made,
        step=0 if state is State.QUEUED else draw(st.integers(0, len(made) - 1)),
        priority=draw(st.sampled_from(Priority)),
        state=state,
        later=draw(st.sampled_from((None, later))),
        client=draw(st.sampled_from("ab")),
        due=draw(st.integers(0, 9)),
    )


@given(st.lists(any_flight(), max_size=14), st.integers(2, 8), st.integers(2, 8))
def test_looking_ahead_in_strides_finds_what_every_tick_would(
    drawn: list[Flight], rows: int, crowded_rows: int
) -> None:
    flights = [replace(f, id=i) for i, f in enumerate(drawn)]
    known = costs({1: 1.0, 2: 1.7, 4: 2.9, 8: 5.1})
    limits = replace(LIMITS, rows=rows, crowded_rows=crowded_rows, paused_cache_rows=2)
    found = project(flights, limits, known, 3.0)
    assert found == pytest.approx(tick_by_tick(flights, limits, known, 3.0))
