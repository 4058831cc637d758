"""The policy's record of a picture in the loop, as plain data. It knows no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Literal, NamedTuple

from sdxl.controls import Window
from sdxl.deepcache import Step, StepPlan
from sdxl.image_prompts import ImageWindow
from sdxl.specs import (
    CONTROL,
    CONTROLLED,
    IMAGE,
    IMAGE_COUNTS,
    IMAGE_TOKENS,
    PROMPTED,
    VARIANTS,
    Axes,
)

Network = Literal["unet_deep", "unet_shallow", "control_deep"]


class Variant(NamedTuple):
    """A call's additions to the plain network. A greater variant also runs rows of a lesser one."""

    name: str = ""
    """a key of specs.VARIANTS; empty: the plain network"""
    pages: int = 0
    """pages of LoRAs for each row"""
    is_controlled: bool = False
    """True if residuals of ControlNets are added"""
    images: int = 0
    """image prompts of each row"""
    image_tokens: int = 0
    """tokens of each image prompt"""

    def of(self, network: str) -> Variant:
        """Return the part of the variant that concerns one network."""
        has_loras = network in VARIANTS.get(self.name, ())
        is_prompted = network in PROMPTED
        return (self if has_loras else PLAIN)._replace(
            is_controlled=self.is_controlled and network in CONTROLLED,
            images=self.images if is_prompted else 0,
            image_tokens=self.image_tokens if is_prompted else 0,
        )

    def graph(self, network: str) -> str:
        """Return the name of the network with these additions."""
        part, name = self.of(network), VARIANTS.get(self.name, {}).get(network, network)
        name = f"{name}+{CONTROL}" if part.is_controlled else name
        return f"{name}+{IMAGE}" if part.images else name

    def with_images(self, windows: Sequence[ImageWindow]) -> Variant:
        """Return the least variant that also has room for these image prompts."""
        if not windows:
            return self
        most = max(window.tokens for window in windows)
        return self._replace(
            images=next(count for count in IMAGE_COUNTS if count >= len(windows)),
            image_tokens=next(tokens for tokens in IMAGE_TOKENS if tokens >= most),
        )

    def joined(self, other: Variant) -> Variant:
        """Return the least variant that runs rows of both."""
        name = max(self.name, other.name, key=["", *VARIANTS].index)
        return Variant(
            name,
            max(self.pages, other.pages),
            self.is_controlled or other.is_controlled,
            max(self.images, other.images),
            max(self.image_tokens, other.image_tokens),
        )


PLAIN = Variant()


class CallKey(NamedTuple):
    """A call of the UNet or of a ControlNet."""

    network: Network
    axes: Axes
    """sizes of all axes except the rows"""
    variant: Variant = PLAIN
    net: str = ""
    """key of the ControlNet"""
    is_refined: bool = False
    """True if the UNet is the refiner's"""


class Priority(IntEnum):
    """The lower value runs first. A batch image runs only while no interactive image waits."""

    INTERACTIVE = 0
    BATCH = 1


class State(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"


@dataclass(frozen=True)
class Leg:
    """The next leg of an image: more steps, at another size."""

    axes: Axes
    plan: StepPlan
    delay_s: float = 0.0
    """seconds before its first step, to decode the first leg's latents and encode them again"""
    work_s: float = 0.0
    """seconds of the device"""


@dataclass(frozen=True)
class Flight:
    """The policy's record of one picture in the loop."""

    id: int
    axes: Axes
    plan: StepPlan
    step: int = 0
    priority: Priority = Priority.INTERACTIVE
    deadline_s: float = math.inf
    state: State = State.QUEUED
    client: str = ""
    """clients share the device"""
    weight: float = 1.0
    """weight of the client's share"""
    work_s: float = 0.0
    """seconds of the device, estimated at admission; includes the later leg"""
    images: float = 1.0
    """the work in standard images"""
    due: float = 0.0
    """the virtual time at which it would be done if all clients ran at once"""
    is_last: bool = False
    """True if no image pauses for it, because other promises leave no room"""
    request_id: str = ""
    """images of one request are promised together"""
    variant: Variant = PLAIN
    """variant of its calls, without image prompts"""
    rides: bool = False
    """True if its rows share calls with rows of other variants"""
    windows: tuple[Window, ...] = ()
    """windows of its ControlNets, which run before deep steps, sorted by net"""
    image_windows: tuple[ImageWindow, ...] = ()
    """windows of its image prompts, which deep steps attend to"""
    later: Leg | None = None
    is_later: bool = False
    """True in a later leg"""
    pasted: float = 0.0
    """pixels of the images that the result is pasted into, relative to the model's own size"""

    def call(self, network: Network) -> CallKey:
        """Return the call of its next step if no other image shared it."""
        is_refined = self.next_step.is_refined
        return CallKey(network, self.axes, self.step_variant.of(network), is_refined=is_refined)

    @property
    def step_variant(self) -> Variant:
        """The variant of its next step; the refiner supports no LoRAs and no ControlNets."""
        if self.next_step.is_refined:
            return PLAIN
        return self.variant.with_images([self.image_windows[i] for i in self.image_places])

    @property
    def image_places(self) -> tuple[int, ...]:
        """The indices in `image_windows` of the next step's image prompts."""
        if not self.image_windows or self.next_step.is_refined:
            return ()
        steps = len(self.plan)
        return tuple(i for i, w in enumerate(self.image_windows) if w.covers(self.step, steps))

    @property
    def next_step(self) -> Step:
        return self.plan[self.step]

    @property
    def next_is_deep(self) -> bool:
        return self.next_step.is_deep

    @property
    def nets(self) -> list[tuple[int, Window]]:
        """The ControlNets of its next step, with their indices in `windows`."""
        if not self.windows or not self.next_is_deep or self.next_step.is_refined:
            return []
        steps = len(self.plan)
        return [(i, w) for i, w in enumerate(self.windows) if w.covers(self.step, steps)]

    @property
    def to_deep(self) -> float:
        return self.plan.to_deep[self.step]

    @property
    def batch_key(self) -> tuple[Axes, Variant, bool]:
        """Images with equal keys can share the call of their next deep steps."""
        is_refined = self.plan.deep_is_refined[self.step]
        is_plain = self.rides or is_refined
        variant = PLAIN if is_plain else self.variant.with_images(self.image_windows)
        return self.axes, variant, is_refined

    @property
    def rows(self) -> int:
        """The rows that it needs room for: the most of its remaining steps."""
        return self.plan.room[self.step]

    @property
    def steady_ticks(self) -> int:
        """The ticks until it needs less room, because guidance ends or it is done."""
        return self.plan.steady[self.step]

    @property
    def needs_cache(self) -> bool:
        """True between deep steps: a pause would keep its cache in memory."""
        return self.step > 0 and not self.next_is_deep

    @property
    def is_done(self) -> bool:
        return self.step == len(self.plan)

    @property
    def steps_left(self) -> int:
        return len(self.plan) - self.step + (len(self.later.plan) if self.later else 0)

    @property
    def next_leg(self) -> Flight:
        """The image in its next leg, which waits at the old place in the queue."""
        assert self.later is not None
        share = self.later.work_s / self.work_s if self.work_s else 1.0
        return self.changed(
            axes=self.later.axes,
            plan=self.later.plan,
            step=0,
            state=State.QUEUED,
            work_s=self.later.work_s,
            images=self.images * share,
            later=None,
            is_later=True,
        )

    def advanced(self, ticks: int = 1) -> Flight:
        return self.changed(step=self.step + ticks)

    def changed(self, **fields: object) -> Flight:
        # A projection calls this a thousand times, and dataclasses.replace is five times as slow.
        copy = object.__new__(Flight)
        vars(copy).update(vars(self), **fields)
        return copy
