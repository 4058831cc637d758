"""One image's tensors, and how images lie in a call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sdxl import schedulers
from sdxl.adapters import NO_ADAPTERS, Pages, lora_inputs
from sdxl.flight import PLAIN, Variant
from sdxl.specs import Axes

SCALE, TIMESTEP = (schedulers.COLUMNS.index(name) for name in ("s", "timestep"))


@dataclass(eq=False)
class ImageTensors:
    """One image's tensors on the device. Rows: the positive one, then the negative one if any."""

    latents: Tensor
    """[channels, h, w], float32; in a slot [channels, 1, slot], as all maps"""
    guidance: float
    masked: Tensor | None = None
    """[channels, h, w]: input of an inpainting UNet besides the latents"""
    slot: int | None = None
    """pixels of its slot; None outside slots"""
    pages: Pages = NO_ADAPTERS.unet
    """its LoRAs"""
    controls: Sequence[Any] = ()
    """states of its ControlNets (control_calls.py)"""
    prompts: Sequence[list[Tensor]] = ()
    """its image prompts: keys and values stacked by width, [tensors, rows, tokens, width]"""
    sides: tuple[int, int] = field(init=False)
    """height and width of its latents"""
    estimate: Tensor = field(init=False)
    """of the finished picture, like the latents"""
    text: list[Tensor] = field(default_factory=list)
    """outputs of `unet_prompt`, stacked by shape: [rows, tensors, ...]"""
    cache: list[Tensor] = field(default_factory=list)
    """[rows, memory of a map] of each cache, once they had to leave the stage"""
    residuals: list[list[Tensor]] = field(default_factory=list)
    """what ControlNets add in the next deep step, of each row"""
    kept_residuals: list[list[Tensor]] = field(default_factory=list)
    """those of them that shallow steps add, too"""
    staged: Layout | None = None
    """the call whose caches on the stage are this image's, until they leave it"""
    keeps_cache: bool = False
    """True if the next step reads the caches."""

    def __post_init__(self) -> None:
        height, width = self.latents.shape[1:]
        self.sides = height, width
        self.latents = self.in_slot(self.latents)
        self.masked = None if self.masked is None else self.in_slot(self.masked)
        self.estimate = torch.zeros_like(self.latents)

    def in_slot(self, given: Tensor) -> Tensor:
        """Return a map [channels, h, w] as it lies in the image's slot, followed by zeros."""
        if self.slot is None:
            return given
        pixels = given.flatten(1)
        return pad(pixels, (0, self.slot - pixels.shape[1]))[:, None]

    def picture(self, own: Tensor) -> Tensor:
        """Return a view [channels, h, w] of one of its maps."""
        if self.slot is None:
            return own
        height, width = self.sides
        return own[:, 0, : height * width].unflatten(1, self.sides)

    def release(self) -> None:
        """Free everything but the result."""
        self.text, self.cache, self.staged, self.keeps_cache = [], [], None, False
        self.controls, self.residuals, self.kept_residuals = [], [], []
        self.prompts = []


@dataclass(frozen=True)
class Member:
    """An image that takes part in a call."""

    image: ImageTensors
    is_guided: bool
    """True if it has a negative row in this call."""
    prompts: tuple[int, ...] = field(default=(), compare=False)
    """the image prompts of this step, by their places in `image.prompts`"""


@dataclass(frozen=True)
class Layout:
    """How a call lies on the stage: each member's positive row, then the negative rows, then copies
    of row 0 up to the bucket."""

    axes: Axes
    bucket: int
    members: tuple[Member, ...]
    variant: Variant = field(default=PLAIN, compare=False)
    is_refined: bool = False
    """whether it lies on the refiner's stage"""

    @cached_property
    def rows_of_members(self) -> list[list[int]]:
        """The rows of each member, positive first."""
        free = itertools.count(len(self.members))
        return [[i, next(free)] if m.is_guided else [i] for i, m in enumerate(self.members)]

    @property
    def used_rows(self) -> int:
        return sum(1 + member.is_guided for member in self.members)

    @cached_property
    def member_of_row(self) -> list[int]:
        guided = [i for i, member in enumerate(self.members) if member.is_guided]
        used = [*range(len(self.members)), *guided]
        return used + [0] * (self.bucket - len(used))

    def rows(self, tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the tensor of each row of the stage; `tensors` are the members' rows."""
        found = {
            place: tensor
            for places, own in zip(self.rows_of_members, tensors, strict=True)
            for place, tensor in zip(places, own, strict=False)
        }
        return [found.get(place, found[0]) for place in range(self.bucket)]


class Tables:
    """What the host tells the calls of one bucket."""

    def __init__(self, bucket: int, device: torch.device) -> None:
        self.numbers = torch.zeros(bucket, len(schedulers.COLUMNS) + 1, device=device)
        """each member's coefficients of this step, and its guidance"""
        self.member_of_row, self.negative_row = torch.zeros(
            2, bucket, dtype=torch.int64, device=device
        )
        """the negative row is the positive one if there is no other"""
        self.sides = torch.ones(bucket, 2, dtype=torch.int32, device=device)
        """each row's latent height and width"""
        self._loras: dict[int, dict[str, Tensor]] = {}
        self._content: object = None

    def fill(self, coefficients: Tensor, layout: Layout) -> None:
        guidance = torch.tensor([[member.image.guidance] for member in layout.members])
        fill(self.numbers, torch.cat([coefficients, guidance], 1))
        content = (
            layout.variant,
            [
                (member.is_guided, member.image.sides, member.image.pages)
                for member in layout.members
            ],
        )
        if content != self._content:
            self._content = content
            sides = [layout.members[i].image.sides for i in layout.member_of_row]
            fill(self.sides, torch.tensor(sides, dtype=torch.int32))
            fill(self.member_of_row, torch.tensor(layout.member_of_row))
            fill(self.negative_row, torch.tensor([rows[-1] for rows in layout.rows_of_members]))
            if count := layout.variant.pages:
                pages = [layout.members[i].image.pages for i in layout.member_of_row]
                for name, values in lora_inputs(pages, count).items():
                    fill(self.loras(count)[name], values)

    def loras(self, count: int) -> dict[str, Tensor]:
        """Each row's pages and their scales, for calls with this many."""
        if count not in self._loras:
            device, bucket = self.sides.device, len(self.sides)
            given = lora_inputs([NO_ADAPTERS.unet] * bucket, count)
            self._loras[count] = {name: each.to(device) for name, each in given.items()}
        return self._loras[count]

    @cached_property
    def coefficients(self) -> tuple[Tensor, ...]:
        return schedulers.columns(self.numbers[:, :-1])

    @cached_property
    def guidance(self) -> Tensor:
        return self.numbers[:, -1].view(-1, 1, 1, 1)


def stacked_by_width(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Stack those of one width; the widths are in the order of their first."""
    groups: dict[int, list[Tensor]] = {}
    for each in tensors:
        groups.setdefault(each.shape[-1], []).append(each)
    return [torch.stack(group) for group in groups.values()]


def fill(target: Tensor, values: Tensor) -> None:
    """Fill the first lines without waiting for the device."""
    if target.is_cuda and not values.is_cuda:
        values = values.pin_memory()
    target[: len(values)].copy_(values, non_blocking=True)


def scaled_sample(latents: Tensor, tables: Tables, sample: Tensor, timestep: Tensor) -> None:
    """Fill a network's inputs of this step: each row's scaled latents and its own timestep."""
    scaled, times = latents * tables.coefficients[SCALE], tables.coefficients[TIMESTEP]
    sample.copy_(scaled.index_select(0, tables.member_of_row))
    timestep.copy_(times.flatten().index_select(0, tables.member_of_row))
