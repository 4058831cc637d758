"""After the warm-up, traffic of the official sizes records and allocates nothing.
tests/engines/pytorch/test_forms.py shows that it compiles nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from engines.cuda.device import CudaDevice
from engines.cuda.recordings import Ticks
from engines.pytorch.slots import slot_of
from eval.gpu.mixed import OFFICIAL
from sdxl.engine import PassedFence
from sdxl.inflight import InFlight
from sdxl.policy import Limits
from tests.engines.cuda_double import FakeCuda
from tests.fakes import FakeClock, fake_engines
from tests.sdxl.flights import request

BUCKETS = (1, *range(2, 17, 2))
SIDES = [
    (height // 8, width // 8) for height, width in OFFICIAL if slot_of(height // 8, width // 8, 128)
]
REQUESTS = 600


@pytest.fixture
def flight(monkeypatch: pytest.MonkeyPatch) -> InFlight:
    FakeCuda().install(monkeypatch)
    engines = replace(
        fake_engines(BUCKETS),
        run_recorded=Ticks(CudaDevice(torch.device("cuda", 1))),
        fence=PassedFence,
        slot_of=partial(slot_of, standard=128),
    )
    return InFlight(engines, FakeClock(), Limits(BUCKETS, rows=16))


def counts_of(flight: InFlight) -> Counter[str]:
    ticks = flight.engines.run_recorded
    assert isinstance(ticks, Ticks)
    return Counter(ticks.counts)


def warm_up(flight: InFlight, height: int, width: int) -> None:
    for bucket in BUCKETS:
        for seed in range(bucket):
            flight.submit(request(seed, side=height, width=width, guidance=0.0))
        flight.drain()


def test_official_sizes_record_and_allocate_nothing_after_the_warm_up(flight: InFlight) -> None:
    warm_up(flight, 128, 128)
    before, memory = counts_of(flight), set(flight._stage._memory._memory)
    assert before["captured"] == 2 * len(BUCKETS)
    chance = random.Random(3)
    for number in range(REQUESTS):
        height, width = chance.choice(SIDES)
        flight.submit(
            request(
                number,
                side=height,
                width=width,
                steps=chance.randint(2, 6),
                interval=chance.randint(1, 3),
                guidance=chance.choice((0.0, 5.0)),
                scheduler=chance.choice(("euler", "euler_a", "dpmpp_2m")),
            )
        )
        for _ in range(chance.randint(0, 2)):
            flight.tick()
    flight.drain()
    after = counts_of(flight)
    assert after["replayed"] > before["replayed"] + REQUESTS
    assert {name for name in after if after[name] != before[name]} == {"replayed"}
    assert set(flight._stage._memory._memory) == memory


def test_a_new_class_of_sizes_is_recorded_once(flight: InFlight) -> None:
    """Odd latents share calls only with the same size."""
    warm_up(flight, 128, 128)
    before = counts_of(flight)
    for _ in range(3):
        warm_up(flight, 125, 127)
    new = counts_of(flight) - before
    assert new["captured"] == 2 * len(BUCKETS) and not new["unrecorded"] and not new["evicted"]
