"""The tensors of an image in flight, and the arrangement of images in a call."""

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
    """One image's tensors on the device. The negative row, if any, follows the positive one."""

    latents: Tensor
    """[channels, h, w], float32; all maps in a slot are [channels, 1, slot]"""
    guidance: float
    masked: Tensor | None = None
    """[channels, h, w]: input of an inpainting UNet besides the latents"""
    slot: int | None = None
    """pixels of the slot; None outside slots"""
    pages: Pages = NO_ADAPTERS.unet
    """LoRAs"""
    controls: Sequence[Any] = ()
    """states of the ControlNets (control_calls.py)"""
    prompts: Sequence[list[Tensor]] = ()
    """image prompts: keys and values stacked by width, [tensors, rows, tokens, width]"""
    sides: tuple[int, int] = field(init=False)
    """height and width of the latents"""
    estimate: Tensor = field(init=False)
    """estimate of the finished picture, in the shape of the latents"""
    text: list[Tensor] = field(default_factory=list)
    """outputs of `unet_prompt`, stacked by shape: [rows, tensors, ...]"""
    cache: list[Tensor] = field(default_factory=list)
    """[rows, memory of a map] of each cache, once other caches have replaced it on the stage"""
    residuals: list[list[Tensor]] = field(default_factory=list)
    """residuals of ControlNets for the next deep step, a list of rows for each"""
    kept_residuals: list[list[Tensor]] = field(default_factory=list)
    """the residuals that the following shallow steps also add"""
    staged: Layout | None = None
    """the call that left this image's caches on the stage; None once they are gone"""
    keeps_cache: bool = False
    """True if the next step reads the caches"""

    def __post_init__(self) -> None:
        height, width = self.latents.shape[1:]
        self.sides = height, width
        self.latents = self.in_slot(self.latents)
        self.masked = None if self.masked is None else self.in_slot(self.masked)
        self.estimate = torch.zeros_like(self.latents)

    def in_slot(self, map_: Tensor) -> Tensor:
        """Return a map [channels, h, w] in the slot's shape, padded with zeros."""
        if self.slot is None:
            return map_
        pixels = map_.flatten(1)
        return pad(pixels, (0, self.slot - pixels.shape[1]))[:, None]

    def picture(self, map_: Tensor) -> Tensor:
        """Return a view [channels, h, w] of one of the image's maps."""
        if self.slot is None:
            return map_
        height, width = self.sides
        return map_[:, 0, : height * width].unflatten(1, self.sides)

    def release(self) -> None:
        """Free everything except the result."""
        self.text, self.cache, self.staged, self.keeps_cache = [], [], None, False
        self.controls, self.residuals, self.kept_residuals = [], [], []
        self.prompts = []


@dataclass(frozen=True)
class Member:
    """An image in a call."""

    image: ImageTensors
    is_guided: bool
    """True if the image has a negative row in this call"""
    prompts: tuple[int, ...] = field(default=(), compare=False)
    """the indices in `image.prompts` of this step's image prompts"""


@dataclass(frozen=True)
class Layout:
    """The rows of a call: positive rows, then negative ones, then copies of row 0 as padding."""

    axes: Axes
    bucket: int
    members: tuple[Member, ...]
    variant: Variant = field(default=PLAIN, compare=False)
    is_refined: bool = False
    """True on the refiner's stage"""

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
        """Return the tensor of each row of the call; `tensors` are the rows of each member."""
        by_row = {
            row: tensor
            for rows, given in zip(self.rows_of_members, tensors, strict=True)
            for row, tensor in zip(rows, given, strict=False)
        }
        return [by_row.get(row, by_row[0]) for row in range(self.bucket)]


class Tables:
    """The small inputs from the host for calls of one bucket."""

    def __init__(self, bucket: int, device: torch.device) -> None:
        self.numbers = torch.zeros(bucket, len(schedulers.COLUMNS) + 1, device=device)
        """each member's scheduler coefficients and guidance"""
        self.member_of_row, self.negative_row = torch.zeros(
            2, bucket, dtype=torch.int64, device=device
        )
        """the negative row of an unguided member is its positive one"""
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
        """Return each row's pages and their scales, for calls with `count` pages."""
        if count not in self._loras:
            device, bucket = self.sides.device, len(self.sides)
            inputs = lora_inputs([NO_ADAPTERS.unet] * bucket, count)
            self._loras[count] = {name: each.to(device) for name, each in inputs.items()}
        return self._loras[count]

    @cached_property
    def coefficients(self) -> tuple[Tensor, ...]:
        return schedulers.columns(self.numbers[:, :-1])

    @cached_property
    def guidance(self) -> Tensor:
        return self.numbers[:, -1].view(-1, 1, 1, 1)


def stacked_by_width(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Stack the tensors of each width; the widths stay in the order of their first tensor."""
    groups: dict[int, list[Tensor]] = {}
    for each in tensors:
        groups.setdefault(each.shape[-1], []).append(each)
    return [torch.stack(group) for group in groups.values()]


def fill(target: Tensor, values: Tensor) -> None:
    """Copy values to the target's first lines without waiting for the device."""
    if target.is_cuda and not values.is_cuda:
        values = values.pin_memory()
    target[: len(values)].copy_(values, non_blocking=True)


def scaled_sample(latents: Tensor, tables: Tables, sample: Tensor, timestep: Tensor) -> None:
    """Fill a network's inputs of this step: each row's scaled latents and timestep."""
    scaled, times = latents * tables.coefficients[SCALE], tables.coefficients[TIMESTEP]
    sample.copy_(scaled.index_select(0, tables.member_of_row))
    timestep.copy_(times.flatten().index_select(0, tables.member_of_row))
