"""The stage: a call's addresses do not depend on its images, and only what changed is copied."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdxl.inflight import InFlight
from sdxl.rows import Stage
from tests.fakes import FakeClock, fake_engines
from tests.sdxl.flights import assert_same, latents_of, loop, request
from tests.sdxl.reference import denoise
from tests.sdxl.test_inflight import MIX

SIDES = (8, 6, 10, 4)


def mixed(count: int) -> list[Any]:
    """Requests of all sizes, with steps, intervals and guidance that differ."""
    return [
        request(
            n,
            side=SIDES[n % 4],
            steps=2 + n % 5,
            interval=1 + n % 3,
            guidance=(5.0, 0.0, 3.0)[n % 3],
            tokens=(77, 77, 154)[n % 3],
        )
        for n in range(count)
    ]


def bytes_of(stage: Stage) -> int:
    return sum(memory.nbytes for memory in stage._memory.values())


def test_addresses_depend_on_network_axes_and_bucket() -> None:
    addresses = defaultdict[Any, set[tuple[int, ...]]](set)
    flight = loop(rows=8)
    for network in ("unet_deep", "unet_shallow"):
        fake: Any = flight.engines[network]

        def noted(inputs: Any, outputs: Any, fake: Any = fake, network: str = network) -> None:
            shapes = tuple(tuple(t.shape) for t in inputs.values())
            tensors = (*inputs.values(), *outputs.values())
            addresses[network, shapes].add(tuple(t.data_ptr() for t in tensors))
            fake(inputs, outputs)

        noted.spec = fake.spec  # type: ignore[attr-defined]
        flight.engines.by_name[network] = noted  # type: ignore[index]
    for asked in mixed(24):
        flight.submit(asked)
        flight.tick()
    flight.drain()
    assert len(addresses) > 20
    assert {len(each) for each in addresses.values()} == {1}


def test_a_stable_group_copies_no_text_and_no_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    flight = loop()
    ids = [flight.submit(request(seed, steps=9, interval=3)) for seed in range(3)]
    flight.tick()
    stacked: list[tuple[int, ...]] = []
    stack = torch.stack

    def noted(tensors: Any, *args: Any, **named: Any) -> Tensor:
        result: Tensor = stack(tensors, *args, **named)
        stacked.append(tuple(result.shape))
        return result

    monkeypatch.setattr(torch, "stack", noted)
    for _ in range(7):
        flight.tick()
    # Latents and estimates of the three images in each tick, and nothing else.
    assert len(stacked) == 2 * 7 and {dims[0] for dims in stacked} == {3}
    assert not any(flight._tensors(id_).cache for id_ in ids)


def test_sizes_up_to_the_models_own_share_memory() -> None:
    flight = loop(rows=8)
    asked = [request(n, side=side) for n, side in enumerate((6, 4, 2, 5, 3))]
    for each in asked:
        flight.submit(each)
    flight.drain()
    first = bytes_of(flight._stage)
    for each in asked * 3:
        flight.submit(each)
    flight.drain()
    assert bytes_of(flight._stage) == first
    flight.submit(request(side=14))
    flight.drain()
    assert bytes_of(flight._stage) == first, "two rows of more than three times the size fit"
    for seed in range(4):
        flight.submit(request(seed, side=14))
    flight.drain()
    assert first < bytes_of(flight._stage) < 8 * first


def test_a_finished_image_keeps_only_its_result() -> None:
    flight = loop()
    id_ = flight.submit(request(steps=4))
    flight.tick()
    tensors = flight._tensors(id_)
    assert tensors.text and tensors.keeps_cache
    flight.drain()
    assert not (tensors.text or tensors.cache or tensors.keeps_cache)


def test_loops_that_share_a_stage_give_the_pictures_of_each_alone() -> None:
    engines = fake_engines()
    stage = Stage(engines)
    first = loop()
    loops = [InFlight(engines, FakeClock(), first.limits, stage=stage) for _ in range(2)]
    halves = MIX[::2], MIX[1::2]
    ids = [[flight.submit(r) for r in half] for flight, half in zip(loops, halves, strict=True)]
    events: list[list[Any]] = [[], []]
    for _ in range(40):
        for flight, own in zip(loops, events, strict=True):
            own += flight.tick()
    for half, own_ids, own in zip(halves, ids, events, strict=True):
        found = latents_of(own)
        for id_, asked in zip(own_ids, half, strict=True):
            assert_same(found[id_], denoise(replace(engines), asked))


def test_rows_of_one_image_lie_beside_those_of_others() -> None:
    """Positive rows, negative rows, copies of row 0: a picture's bytes depend on the order."""
    flight = loop()
    for guidance in (5.0, 0.0, 3.0):
        flight.submit(request(guidance=guidance))
    flight.tick()
    (layout,) = {id(each): each for each in flight._stage._caches_at.values()}.values()
    assert layout.rows_of_members == [[0, 3], [1], [2, 4]]
    assert layout.member_of_row == [*range(3), 0, 2, *itertools.repeat(0, 3)]
