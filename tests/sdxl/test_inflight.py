"""The in-flight loop on fake engines: how images join, pause and fail, and what is promised. Each
image's latents are those of the same request alone, in any order of events: test_any_order.py.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from sdxl.admission import Refused
from sdxl.engine import PassedFence
from sdxl.flight import Priority, State
from sdxl.inflight import DeadlineExceeded, Event, Failed, Finished, InFlight
from tests.fakes import FakeClock, fake_engines
from tests.sdxl.flights import assert_same, engine, latents_of, loop, request
from tests.sdxl.reference import denoise

MIX = [
    request(1, scheduler="euler", steps=4),
    request(2, scheduler="euler_a", steps=5, interval=3),
    request(3, scheduler="ddim", steps=1, guidance=1.0),
    request(4, scheduler="dpmpp_2m_karras", steps=6, interval=1),
    request(5, scheduler="dpmpp_2m", steps=7, guidance=0.0),
    request(6, steps=3, side=10),
    request(7, steps=6, tokens=154),
    request(8, steps=6, deep_steps=(0, 1, 4)),
    request(9, steps=6, guided_steps=range(3)),
    request(10, steps=7, scheduler="dpmpp_2m", guided_steps=range(2, 5)),
    request(11, steps=6, interval=3, scheduler="euler_a", guided_steps=(0, 1, 4, 5)),
]


def test_a_newcomer_joins_on_a_deep_tick_and_shares_every_call() -> None:
    flight = loop()
    flight.submit(request(1, steps=6))
    flight.tick()
    flight.submit(request(2, steps=8))
    flight.tick()
    assert [f.step for f in flight.flights] == [2, 0], "waits while the others are mid-interval"
    flight.tick()
    assert [f.step for f in flight.flights] == [3, 1]
    calls = engine(flight, "unet_deep").calls
    assert [call["sample"][0] for call in calls] == [2, 4]


def test_rows_are_padded_to_a_bucket() -> None:
    flight = loop()
    for seed in range(3):
        flight.submit(request(seed, steps=1))
    flight.drain()
    assert engine(flight, "unet_deep").calls[0]["sample"][0] == 8


def test_no_more_rows_in_flight_than_the_limit_and_order_is_kept() -> None:
    flight = loop(rows=4)
    ids = [flight.submit(request(seed, steps=3)) for seed in range(5)]
    finished: list[int] = []
    while not flight.is_idle:
        finished += [event.id for event in flight.tick()]
        assert sum(f.rows for f in flight.flights if f.state is State.RUNNING) <= 4
    assert finished == ids


def test_a_paused_image_goes_on_where_it_stopped() -> None:
    flight = loop()
    paused = flight.submit(replace(MIX[7], priority=Priority.BATCH))
    for _ in range(3):
        flight.tick()
    urgent = flight.submit(MIX[0])
    flight.tick()
    assert {f.id: f.state for f in flight.flights}[paused] is State.PAUSED
    found = latents_of(flight.drain())
    assert [*found] == [urgent, paused]
    assert_same(found[paused], denoise(flight.engines, MIX[7]))


def test_above_the_cache_cap_an_image_pauses_just_before_a_deep_step() -> None:
    flight = loop(paused_cache_rows=0)
    id_ = flight.submit(request(1, steps=6, interval=3, priority=Priority.BATCH))
    flight.tick()
    flight.submit(request(2, steps=6))
    for _ in range(5):
        flight.tick()
    state, _ = flight.flights
    assert (state.step, state.next_is_deep, state.state) == (3, True, State.PAUSED)
    tensors = flight._tensors(id_)
    assert not tensors.keeps_cache and not tensors.cache


def test_an_engine_that_raises_fails_only_its_call() -> None:
    flight = loop()
    square = [flight.submit(request(seed, steps=4)) for seed in range(2)]
    other = flight.submit(request(9, steps=4, side=10))
    fault = RuntimeError("out of memory")
    engine(flight, "unet_deep").fault = fault
    events = flight.tick()
    assert {e.id: e.cause for e in events if isinstance(e, Failed)} == dict.fromkeys(square, fault)
    assert set(latents_of(flight.drain())) == {other}


def test_previews_are_the_expected_picture_so_far() -> None:
    flight = loop()
    id_ = flight.submit(request(1, steps=3, scheduler="dpmpp_2m"))
    assert flight.preview(id_) is None
    flight.tick()
    first = flight.preview(id_)
    assert first is not None and first.shape == (4, 8, 10)
    flight.tick()
    second = flight.preview(id_)
    assert second is not None and not torch.equal(first, second)
    flight.drain()
    assert flight.preview(id_) is None


def ticking_loop(**limits: Any) -> InFlight:
    """Return a loop whose clock moves only in calls: a deep one takes 1 s, a shallow one 0.1 s."""
    flight, clock = loop(**limits), FakeClock()
    flight.clock = clock

    def take(seconds: float) -> None:
        clock.now += seconds

    engine(flight, "unet_deep").on_call = partial(take, 1.0)
    engine(flight, "unet_shallow").on_call = partial(take, 0.1)
    return flight


def test_estimates_are_exact_when_costs_are_known() -> None:
    flight = ticking_loop(rows=4)
    for company in (1, 2):
        for seed in range(company):
            flight.submit(request(seed, steps=2))
        flight.drain()
    ids = [flight.submit(request(seed, steps=2 + seed % 3)) for seed in range(5)]
    promised = flight.finish_times()
    done: dict[int, float] = {}
    while not flight.is_idle:
        for event in flight.tick():
            done[event.id] = flight.clock()
    assert {i: pytest.approx(promised[i], abs=1e-6) for i in ids} == done


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    flight = ticking_loop(rows=2)
    flight.submit(request(0, steps=4))
    flight.drain()
    now = flight.clock()
    flight.submit(request(1, steps=4))
    with pytest.raises(Refused, match="the deadline is in 3.00 s") as refusal:
        flight.submit(request(2, steps=4, deadline_s=now + 3.0))
    assert refusal.value.retry_after_s == pytest.approx(1.4)
    assert len(flight.flights) == 1
    flight.submit(request(2, steps=4, deadline_s=now + 4.5))


def test_no_promise_given_is_broken_by_a_newcomer() -> None:
    flight = ticking_loop()
    for count in (1, 2):
        for seed in range(count):
            flight.submit(request(seed, steps=4))
        flight.drain()
    # Eight rows cost four times as much as two, so a newcomer would slow the others down.
    flight.costs.ticks = {key: cost * key.bucket / 2 for key, cost in flight.costs.ticks.items()}
    now = flight.clock()
    promised = flight.submit(request(1, steps=4, deadline_s=now + 2.5))
    with pytest.raises(Refused, match="another image's promised time"):
        flight.submit(request(2, steps=4))
    assert [f.id for f in flight.flights] == [promised]


@pytest.mark.parametrize("sides", [(8,), (8, 10)])
def test_a_newcomer_may_come_while_the_last_call_of_others_is_on_its_way(
    sides: tuple[int, ...],
) -> None:
    """This happens on a GPU, where calls do not block."""
    flight = loop(replace(fake_engines(), calls_ahead=1))
    ids = [flight.submit(request(n, side=side)) for n, side in enumerate(sides)]
    events: list[Event] = []
    while flight.flights:
        events += flight.tick()
    assert not flight.is_idle
    late = flight.submit(request(7, deadline_s=flight.clock() + 100))
    events += flight.drain()
    found = latents_of(events)
    assert sorted(found) == [*ids, late]
    for id_, asked in zip(found, [request(n, side=s) for n, s in enumerate(sides)], strict=False):
        assert_same(found[id_], denoise(fake_engines(), asked))


def test_what_is_finished_was_waited_for() -> None:
    numbers, waited = itertools.count(), list[int]()

    class NumberedFence(PassedFence):
        def __init__(self) -> None:
            self.number = next(numbers)

        def wait(self) -> None:
            waited.append(self.number)

    flight = loop(replace(fake_engines(), calls_ahead=1, fence=NumberedFence))
    flight.submit(request(0, steps=4))
    while not any(isinstance(event, Finished) for event in flight.tick()):
        pass
    # A call has a fence before and after it.
    assert waited == [1, 3, 5, 7] and flight.is_idle


def test_costs_are_the_seconds_of_the_device_in_usual_calls() -> None:
    """A network's first two calls, which prepare and record, and the host's time do not count."""
    calls = Counter[str]()

    class TimedFence(PassedFence):
        def seconds_since(self, earlier: PassedFence) -> float:  # type: ignore[override]
            return 0.25

    def run_recorded(network: str, key: Hashable, work: Callable[[], None]) -> bool:
        work()
        calls[network] += 1
        return calls[network] > 2

    flight = loop(replace(fake_engines(), fence=TimedFence, run_recorded=run_recorded))
    flight.submit(request(0, steps=4))
    flight.drain()
    assert not flight.costs.ticks
    flight.submit(request(0, steps=2))
    flight.drain()
    assert set(flight.costs.ticks.values()) == {0.25}
    assert {key.call.network for key in flight.costs.ticks} == {"unet_deep", "unet_shallow"}


@pytest.mark.parametrize("queue", [1, 4])
def test_a_full_queue_says_when_all_that_wait_have_begun(queue: int) -> None:
    flight = ticking_loop(rows=1, queue=queue)
    flight.submit(request(0, steps=4))
    flight.drain()
    flight.submit(request(0, steps=4))
    flight.tick()
    for seed in range(queue):
        flight.submit(request(seed, steps=4))
    with pytest.raises(Refused, match="the queue is full") as refusal:
        flight.submit(request(9, steps=4))
    last_s = max(flight.finish_times().values()) - flight.clock()
    picture_s = flight.flights[-1].work_s
    assert refusal.value.retry_after_s == pytest.approx(last_s, rel=0.1)
    assert refusal.value.retry_after_s > queue * picture_s > 1


def test_a_full_queue_refuses_and_an_expired_image_is_dropped() -> None:
    flight = loop(rows=2, queue=1)
    flight.submit(request(0, steps=2))
    flight.tick()
    late = flight.submit(request(1, steps=2, deadline_s=5.0))
    with pytest.raises(Refused, match="the queue is full"):
        flight.submit(request(2, steps=2))
    assert isinstance(flight.clock, FakeClock)
    flight.clock.now = 6.0
    (event,) = [e for e in flight.drain() if e.id == late]
    assert isinstance(event, Failed) and isinstance(event.cause, DeadlineExceeded)
