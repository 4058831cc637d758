"""One image on its way, as plain data: what the policy may know of it. It knows no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Literal, NamedTuple

from sdxl.deepcache import Step, StepPlan
from sdxl.specs import Axes

Network = Literal["unet_deep", "unet_shallow"]
PLAIN = "plain"


class CallKey(NamedTuple):
    """What must agree for images to share one UNet call."""

    network: Network
    axes: Axes
    """sizes of all axes but the rows"""
    variant: str = PLAIN
    """which graph of the network"""


class Priority(IntEnum):
    """Lower runs first. A batch image runs only in ticks that no interactive one needs."""

    INTERACTIVE = 0
    BATCH = 1


class State(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"


@dataclass(frozen=True)
class Leg:
    """What an image is to run besides, once its present steps are done: at another size."""

    axes: Axes
    plan: StepPlan
    delay_s: float = 0.0
    """before its first step: what comes out of the steps before is decoded, and encoded again"""
    work_s: float = 0.0
    """seconds of the device, as of a Flight"""


@dataclass(frozen=True)
class Flight:
    """One image on its way: what the policy may know of it."""

    id: int
    axes: Axes
    plan: StepPlan
    step: int = 0
    priority: Priority = Priority.INTERACTIVE
    deadline_s: float = math.inf
    state: State = State.QUEUED
    is_held: bool = False
    """paused by its owner, until resumed"""
    client: str = ""
    """who asked for it: clients share the device"""
    weight: float = 1.0
    """of its client's share"""
    work_s: float = 0.0
    """seconds of the device that it takes, its later leg included, as estimated when it came"""
    images: float = 1.0
    """the same in standard images"""
    due: float = 0.0
    """the virtual time at which it would be done if all clients ran at once"""
    is_last: bool = False
    """it came when others' promises left no room: nobody pauses for it"""
    request_id: str = ""
    """images of one request are promised together"""
    variant: str = PLAIN
    """of the graphs that it runs on"""
    later: Leg | None = None
    pasted: float = 0.0
    """Pixels of the image files that the result is pasted into, over those of the model's own size;
    0: its file has the size that it is made in."""

    def call(self, network: Network) -> CallKey:
        return CallKey(network, self.axes, self.variant)

    @property
    def next_step(self) -> Step:
        return self.plan[self.step]

    @property
    def next_is_deep(self) -> bool:
        return self.next_step.is_deep

    @property
    def to_deep(self) -> float:
        return self.plan.to_deep[self.step]

    @property
    def batch_key(self) -> tuple[Axes, str]:
        """Images that have it in common can share their calls."""
        return self.axes, self.variant

    @property
    def rows(self) -> int:
        """What it needs room for: the most of any step it has left."""
        return self.plan.room[self.step]

    @property
    def steady_ticks(self) -> int:
        """Until it needs less room: guidance has ended, or all is done."""
        return self.plan.steady[self.step]

    @property
    def needs_cache(self) -> bool:
        """Mid-interval: pausing now would keep its cache in memory."""
        return self.step > 0 and not self.next_is_deep

    @property
    def is_done(self) -> bool:
        return self.step == len(self.plan)

    @property
    def steps_left(self) -> int:
        return len(self.plan) - self.step + (len(self.later.plan) if self.later else 0)

    @property
    def next_leg(self) -> Flight:
        """The same image once its present steps are done: it waits again, at its old place."""
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
        )

    def advanced(self, ticks: int = 1) -> Flight:
        return self.changed(step=self.step + ticks)

    def changed(self, **fields: object) -> Flight:
        # Not dataclasses.replace: looking ahead does this a thousand times, and that is five times
        # as slow.
        moved = object.__new__(Flight)
        vars(moved).update(vars(self), **fields)
        return moved
