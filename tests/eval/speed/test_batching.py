"""Disciplines in simulated time, on a device whose calls cost what is written here."""

from __future__ import annotations

import itertools
import statistics

import pytest

from eval.speed import batching
from eval.speed.batching import MEDIUM, MIXES, OURS, Arrival, Kind, MeasuredDevice, p99
from sdxl.cost import CostKey, Costs
from sdxl.flight import CallKey, Network
from sdxl.pipeline import Pipeline
from sdxl.policy import Limits
from tests.fakes import axes

BUCKETS = (2, 4, 6, 8, 10, 12, 14, 16)
SECONDS: dict[Network, tuple[float, float]] = {
    "unet_deep": (3.0e-3, 1.83e-3),
    "unet_shallow": (0.5e-3, 0.24e-3),
}
"""of a call, and of each of its rows: as measured on two cores"""


def device() -> MeasuredDevice:
    ticks = {
        CostKey(CallKey(network, axes(16, 16)), rows): fixed + each * rows
        for network, (fixed, each) in SECONDS.items()
        for rows in BUCKETS
    }
    return batching.device_of(Costs(ticks), Limits(BUCKETS, BUCKETS[-1]))


def test_a_call_less_full_by_a_few_hundredths_is_in_flight_unless_many_wait() -> None:
    limits = device().limits
    assert (limits.rows, limits.crowded_rows) == (14, 16)


@pytest.mark.slow  # half a minute for all of them
@pytest.mark.parametrize("mix", MIXES.values(), ids=list(MIXES))
@pytest.mark.parametrize("load", batching.LOADS)
def test_the_slowest_hundredth_is_no_slower_than_the_best_static_batchers(
    mix: tuple[Kind, ...], load: float
) -> None:
    check_against_static(mix, load, batching.IMAGES)


def test_at_95_percent_of_mixed_qualities_too() -> None:
    check_against_static(MIXES["10 exact steps, 20 or 30 at interval 2"], 0.95, 500)


def check_against_static(mix: tuple[Kind, ...], load: float, images: int) -> None:
    made = device()
    arrivals = batching.arrivals_at(load * made.capacity(mix), mix, images)
    found = {name: p99(each) for name, (each, _) in batching.disciplines(made, arrivals).items()}
    ours = found.pop(OURS)
    assert found.pop("ideal") < ours <= min(found.values()), found


def test_an_image_alone_takes_its_calls_and_nothing_else() -> None:
    made, alone = device(), [Arrival(5.0, MEDIUM)]
    for found in (batching.in_flight(made, alone), batching.static(made, alone, 8)):
        assert found == pytest.approx([made.batch_s(1, MEDIUM)])


def test_a_static_batch_waits_for_its_longest_and_alike_ones_for_nobody() -> None:
    made, arrivals = device(), [Arrival(0.0, (10, 1)), Arrival(0.0, (40, 1))]
    longest = made.batch_s(2, (40, 1))
    assert batching.static(made, arrivals, 8) == pytest.approx([longest, longest])
    alike = batching.static(made, arrivals, 8, is_alike=True)
    assert alike[0] == pytest.approx(made.batch_s(1, (10, 1))) and max(alike) > longest / 2


def test_arrivals_come_at_the_rate_that_was_asked_for() -> None:
    found = batching.arrivals_at(10.0, (MEDIUM,), 5000)
    assert found[-1].at_s == pytest.approx(500, rel=0.05)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(found)]
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.1)
    assert batching.arrivals_at(10.0, (MEDIUM,), 5000) == found


def test_both_networks_are_measured_at_every_bucket(mini: Pipeline) -> None:
    found = batching.measure(mini).costs.ticks
    assert {(key.call.network, key.bucket) for key in found} == {
        (network, bucket) for network in SECONDS for bucket in mini.limits().buckets
    }
