"""Batching disciplines in simulated time, on a device with the costs below."""

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
"""of a call, and of each of its rows, as measured on two cores"""


def device() -> MeasuredDevice:
    ticks = {
        CostKey(CallKey(network, axes(16, 16)), rows): fixed + each * rows
        for network, (fixed, each) in SECONDS.items()
        for rows in BUCKETS
    }
    return batching.make_device(Costs(ticks), Limits(BUCKETS, BUCKETS[-1]))


def test_calls_are_full_only_while_many_wait() -> None:
    limits = device().limits
    assert (limits.rows, limits.crowded_rows) == (14, 16)


@pytest.mark.slow  # half a minute for all of them
@pytest.mark.parametrize("mix", MIXES.values(), ids=list(MIXES))
@pytest.mark.parametrize("load", batching.LOADS)
def test_the_p99_in_flight_is_no_higher_than_the_best_static_one(
    mix: tuple[Kind, ...], load: float
) -> None:
    check_against_static(mix, load, batching.IMAGES)


def test_the_p99_of_mixed_qualities_at_95_percent_load() -> None:
    check_against_static(MIXES["10 exact steps, 20 or 30 at interval 2"], 0.95, 500)


def check_against_static(mix: tuple[Kind, ...], load: float, images: int) -> None:
    gpu = device()
    arrivals = batching.draw_arrivals(load * gpu.capacity(mix), mix, images)
    latencies = batching.compare_disciplines(gpu, arrivals)
    p99s = {name: p99(each) for name, (each, _) in latencies.items()}
    ours = p99s.pop(OURS)
    assert p99s.pop("ideal") < ours <= min(p99s.values()), p99s


def test_an_image_alone_takes_the_time_of_its_calls() -> None:
    gpu, alone = device(), [Arrival(5.0, MEDIUM)]
    for latencies in (batching.serve_in_flight(gpu, alone), batching.serve_static(gpu, alone, 8)):
        assert latencies == pytest.approx([gpu.batch_s(1, MEDIUM)])


def test_a_static_batch_takes_the_time_of_its_longest_request() -> None:
    gpu, arrivals = device(), [Arrival(0.0, (10, 1)), Arrival(0.0, (40, 1))]
    longest = gpu.batch_s(2, (40, 1))
    assert batching.serve_static(gpu, arrivals, 8) == pytest.approx([longest, longest])
    alike = batching.serve_static(gpu, arrivals, 8, is_alike=True)
    assert alike[0] == pytest.approx(gpu.batch_s(1, (10, 1))) and max(alike) > longest / 2


def test_arrivals_have_the_given_rate() -> None:
    arrivals = batching.draw_arrivals(10.0, (MEDIUM,), 5000)
    assert arrivals[-1].at_s == pytest.approx(500, rel=0.05)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(arrivals)]
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.1)
    assert batching.draw_arrivals(10.0, (MEDIUM,), 5000) == arrivals


def test_both_networks_are_measured_at_every_bucket(mini: Pipeline) -> None:
    ticks = batching.measure(mini).costs.ticks
    assert {(key.call.network, key.bucket) for key in ticks} == {
        (network, bucket) for network in SECONDS for bucket in mini.limits().buckets
    }
