"""The stage: a call's addresses do not depend on its images; only changed tensors are copied."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdxl.inflight import InFlight
from sdxl.rows import Stage
from sdxl.specs import Architecture, ModelSpec
from tests.fakes import ARCH, FakeClock, FakeEngine, fake_engines
from tests.sdxl.flights import INPAINTING, assert_same, latents_of, loop, masked_source, request
from tests.sdxl.reference import denoise
from tests.sdxl.test_inflight import MIX

SIDES = (8, 6, 10, 4)


def mixed(count: int) -> list[Any]:
    """Requests of all sizes, with different steps, intervals and guidance."""
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
    return sum(memory.nbytes for memory in stage._memory._memory.values())


def test_addresses_depend_on_network_axes_and_bucket() -> None:
    addresses = defaultdict[Any, set[tuple[int, ...]]](set)
    flight = loop()
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
    # Only the latents and estimates of the three images in each tick.
    assert len(stacked) == 2 * 7 and {dims[0] for dims in stacked} == {3}
    assert not any(flight._tensors(id_).cache for id_ in ids)


def test_sizes_up_to_the_models_own_share_memory() -> None:
    flight = loop()
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
    stage, limits = Stage(engines), loop().limits
    loops = [InFlight(engines, FakeClock(), limits, stage=stage) for _ in range(2)]
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
    """A picture's bytes depend on the order: positive rows, negative rows, copies of row 0."""
    flight = loop()
    for guidance in (5.0, 0.0, 3.0):
        flight.submit(request(guidance=guidance))
    flight.tick()
    (layout,) = {id(each): each for each in flight._stage._caches_at.values()}.values()
    assert layout.rows_of_members == [[0, 3], [1], [2, 4]]
    assert layout.member_of_row == [*range(3), 0, 2, *itertools.repeat(0, 3)]


@dataclass
class FakeSlotEngine:
    """Computes each row alone on its own map, and writes NaN behind the map."""

    engine: FakeEngine
    calls: list[list[tuple[int, int]]] = field(default_factory=list)

    @property
    def spec(self) -> ModelSpec:
        return self.engine.spec

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        sides = [(int(h), int(w)) for h, w in inputs["sides"]]
        self.calls.append(sides)
        for row, (height, width) in enumerate(sides):
            own = {}
            for t in self.spec.inputs:
                given = inputs[t.name][row : row + 1]
                if "latent_h" in t.dims:
                    given = given[:, :, 0, : height * width].unflatten(2, (height, width))
                own[t.name] = given
            made = {
                t.name: torch.empty(1, outputs[t.name].shape[1], height, width)
                for t in self.spec.outputs
            }
            self.engine(own, made)
            for name, value in made.items():
                outputs[name][row] = torch.nan
                outputs[name][row, :, 0, : height * width] = value[0].flatten(1)


@pytest.mark.parametrize("arch", [ARCH, INPAINTING])
def test_pictures_of_several_sizes_share_calls_in_slots(arch: Architecture) -> None:
    plain = fake_engines(arch=arch)
    slotted = {name: FakeSlotEngine(plain[name]) for name in ("unet_deep", "unet_shallow")}  # type: ignore[arg-type]
    engines = replace(
        plain,
        by_name={**plain.by_name, **slotted},
        slot_of=lambda height, width: 128 if height < 12 else None,
    )
    flight = loop(engines)
    asked = [
        request(
            n,
            side=side,
            steps=4 + n,
            interval=2,
            scheduler=("euler", "euler_a")[n % 2],
            guidance=(5.0, 0.0)[n == 3],
            arch=arch,
            source=masked_source(n, side, side + 2) if arch is INPAINTING else None,
        )
        for n, side in enumerate((8, 10, 6, 4))
    ]
    ids = [flight.submit(each) for each in asked]
    events = flight.tick()
    preview = flight.preview(ids[1])
    assert preview is not None and preview.shape[1:] == (10, 12)
    found = latents_of([*events, *flight.drain()])
    for id_, each in zip(ids, asked, strict=True):
        assert_same(found[id_], denoise(plain, each))
    (together, *_) = slotted["unet_deep"].calls
    assert set(together) == {(8, 10), (10, 12), (6, 8), (4, 6)}
