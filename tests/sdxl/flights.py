"""Loops over fake engines, and requests for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdxl import deepcache, schedulers
from sdxl.checkpoint import find
from sdxl.editing import MaskedPicture, SourceLatents
from sdxl.engine import Engines
from sdxl.inflight import Event, Failed, Finished, InFlight, Request
from sdxl.policy import Group, Limits
from sdxl.specs import Architecture
from tests.fakes import ARCH, FakeClock, FakeEngine, fake_conditioning, fake_engines

CONFIG = find("mini").scheduler


def request(
    seed: int = 0,
    *,
    steps: int = 4,
    interval: int = 2,
    scheduler: str = "euler",
    guidance: float = 5.0,
    side: int = 8,
    width: int | None = None,
    tokens: int = 77,
    deep_steps: tuple[int, ...] | None = None,
    guided_steps: Collection[int] | None = None,
    arch: Architecture = ARCH,
    **rest: Any,
) -> Request:
    if is_alone := guidance <= 1 or arch.embeds_guidance:
        guided_steps = ()
    return Request(
        fake_conditioning(seed, 1 if is_alone else 2, tokens, arch),
        schedulers.table(scheduler, steps, CONFIG),
        deepcache.plan(steps, interval, deep_steps, guided_steps),
        guidance,
        seed,
        side,
        width or side + 2,
        **rest,
    )


def masked_source(seed: int, height: int, width: int) -> SourceLatents:
    """Return random latents of a masked source for an inpainting checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    mean, below = torch.randn(2, ARCH.latent_channels, height, width, generator=generator)
    mask = torch.rand(1, height, width, generator=generator).round()
    return SourceLatents(mean, masked=MaskedPicture(mask, below))


def loop(engines: Engines | None = None, rows: int = 8, **limits: Any) -> InFlight:
    engines = engines or fake_engines()
    return InFlight(engines, FakeClock(), Limits(buckets=engines.buckets, rows=rows, **limits))


def engine(flight: InFlight, network: str) -> FakeEngine:
    found = flight.engines[network]
    assert isinstance(found, FakeEngine)
    return found


INPAINTING = replace(ARCH, masked_channels=ARCH.latent_channels + 1)
EMBEDDING = replace(ARCH, guidance_channels=6)


def latents_of(events: list[Event]) -> dict[int, Tensor]:
    for event in events:
        if isinstance(event, Failed):
            raise event.cause
    return {event.id: event.latents for event in events if isinstance(event, Finished)}


def assert_same(found: Tensor, expected: Tensor) -> None:
    difference = float((found - expected).abs().max())
    scale = float(expected.abs().max())
    assert difference <= 1e-5 * max(scale, 1.0), f"differs by {difference:.2e} of {scale:.2e}"


@contextmanager
def launched_groups() -> Iterator[list[Group]]:
    """Yield a list of the groups that loops launch inside the block."""
    groups: list[Group] = []
    launch = InFlight._launch

    def noted(self: InFlight, group: Group, whole: Group, events: Any) -> None:
        groups.append(group)
        launch(self, group, whole, events)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InFlight, "_launch", noted)
        yield groups
