"""Who runs what at the next tick: pure decisions over plain data.

`plan_tick` is the whole policy of the in-flight loop: which images are admitted, which pause,
which rows share one UNet call and to what size that call is padded. The executor obeys it, and
cost.py runs it forward in time to predict completions, so promise and practice cannot drift.
It knows no tensors, no engines and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import lru_cache
from typing import Literal, NamedTuple

from sdxl.deepcache import Plan

Network = Literal["unet_deep", "unet_shallow"]


class Shape(NamedTuple):
    """What must agree within one UNet call."""

    latent_h: int
    latent_w: int
    tokens: int


class Priority(IntEnum):
    """Lower runs first. A batch image runs only in ticks that no interactive one needs."""

    INTERACTIVE = 0
    BATCH = 1


class State(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"


@dataclass(frozen=True)
class Flight:
    """One image on its way: what the policy may know of it."""

    id: int
    shape: Shape
    rows: int
    plan: Plan
    step: int = 0
    priority: Priority = Priority.INTERACTIVE
    deadline_s: float = math.inf
    state: State = State.QUEUED
    is_held: bool = False
    """paused by its owner, until resumed"""

    @property
    def next_is_deep(self) -> bool:
        return self.plan[self.step]

    @property
    def needs_cache(self) -> bool:
        """Mid-interval: pausing now would keep its cache in memory."""
        return self.step > 0 and not self.next_is_deep

    @property
    def is_done(self) -> bool:
        return self.step == len(self.plan)

    @property
    def rhythm(self) -> tuple[Shape, int]:
        """Flights of one rhythm that start on the same beat share every call."""
        return self.shape, first_interval(self.plan)

    def advanced(self, ticks: int = 1) -> Flight:
        # Not dataclasses.replace: looking ahead does this a thousand times, and that is five times
        # as slow.
        moved = object.__new__(Flight)
        vars(moved).update(vars(self), step=self.step + ticks)
        return moved


@lru_cache(maxsize=1024)
def first_interval(plan: Plan) -> int:
    """Ticks from the first deep step to the second."""
    return plan.index(True, 1) if any(plan[1:]) else len(plan)


@dataclass(frozen=True)
class Limits:
    """What one device takes on."""

    buckets: tuple[int, ...]
    """row counts a call is padded to, rising"""
    rows: int
    """rows in flight: the knee of the measured tick cost"""
    paused_cache_rows: int = 16
    """rows whose caches may wait in memory while paused"""
    queue: int = 1000
    """images that may wait"""

    def __post_init__(self) -> None:
        if list(self.buckets) != sorted(set(self.buckets)) or self.buckets[-1] < 2:
            raise ValueError(f"buckets: {self.buckets}; needed rising row counts, the last >= 2")

    def bucket(self, rows: int) -> int:
        return next(size for size in self.buckets if size >= rows)


@dataclass(frozen=True)
class Group:
    """The images of one UNet call, and the row count it is padded to."""

    network: Network
    shape: Shape
    ids: tuple[int, ...]
    bucket: int


@dataclass(frozen=True)
class TickPlan:
    groups: tuple[Group, ...]
    admitted: tuple[int, ...] = ()
    """queued before, running from this tick on"""
    paused: tuple[int, ...] = ()
    resumed: tuple[int, ...] = ()
    expired: tuple[int, ...] = ()
    """past their deadline: nobody waits for them any more"""


def plan_tick(flights: Sequence[Flight], limits: Limits, now: float) -> TickPlan:
    """`flights` in order of arrival. Every running image takes exactly one step in a tick."""
    expired = tuple(f.id for f in flights if f.deadline_s < now)
    alive = [f for f in flights if f.deadline_s >= now] if expired else list(flights)
    kept, halted = _who_goes_on(alive, limits)
    joining = _who_joins(alive, kept, limits)
    running = [*kept, *joining]
    return TickPlan(
        groups=tuple(groups_of(running, limits)),
        admitted=tuple(f.id for f in joining if f.state is State.QUEUED),
        paused=tuple(f.id for f in halted),
        resumed=tuple(f.id for f in joining if f.state is State.PAUSED),
        expired=expired,
    )


def foremost(flights: Collection[Flight], limits: Limits) -> list[Flight]:
    """Those of `flights`, in their order, on which the next tick's plan can depend."""
    active, room = _active_class(flights), limits.rows
    found = []
    for flight in flights:
        if flight.state is State.QUEUED:
            if room <= 0 or flight.is_held or flight.priority != active:
                continue
            room -= flight.rows
        found.append(flight)
    return found


def unchanged_ticks(
    flights: Collection[Flight], running: Collection[Flight], limits: Limits
) -> int:
    """For how many ticks, the one just planned included, `plan_tick` is sure to run exactly these
    `running` of the `flights`, if nothing arrives."""
    active = _active_class(flights)
    if any(f.is_held or f.priority != active for f in running):
        return 1
    ids = {f.id for f in running}
    waiting = [f for f in flights if f.id not in ids and not f.is_held and f.priority == active]
    first = min(waiting, key=lambda f: f.state is State.QUEUED, default=None)
    if first is not None and first.rows <= limits.rows - sum(f.rows for f in running):
        return 1
    return min(len(f.plan) - f.step for f in running)


def _active_class(flights: Iterable[Flight]) -> Priority | None:
    """The most urgent class that wants to run."""
    return min((f.priority for f in flights if not f.is_held), default=None)


def _who_goes_on(flights: Sequence[Flight], limits: Limits) -> tuple[list[Flight], list[Flight]]:
    """Running images that keep running, and those that pause.

    One that should pause but holds a cache, while too many caches already wait, runs on to just
    before its next deep step: there is nothing to keep then.
    """
    active = _active_class(flights)
    waiting = sum(f.rows for f in flights if f.state is State.PAUSED and f.needs_cache)
    kept, halted = [], []
    for flight in flights:
        if flight.state is not State.RUNNING:
            continue
        is_wanted = not flight.is_held and flight.priority == active
        cache_rows = flight.rows if flight.needs_cache else 0
        if is_wanted or (cache_rows and waiting + cache_rows > limits.paused_cache_rows):
            kept.append(flight)
        else:
            waiting += cache_rows
            halted.append(flight)
    return kept, halted


def _who_joins(flights: Sequence[Flight], kept: Sequence[Flight], limits: Limits) -> list[Flight]:
    """Paused images first, then queued ones, in order of arrival while rows are free.

    Order is strict: the first that does not fit ends it, so nothing large starves. One whose
    rhythm is already in flight waits, with its place kept, until those reach a deep step.
    """
    active = _active_class(flights)
    candidates = [
        f
        for f in flights
        if f.state is not State.RUNNING and not f.is_held and f.priority == active
    ]
    candidates.sort(key=lambda f: f.state is State.QUEUED)
    free = limits.rows - sum(f.rows for f in kept)
    beats: dict[tuple[Shape, int], bool] = {}
    for flight in kept:
        beats[flight.rhythm] = beats.get(flight.rhythm, False) or flight.next_is_deep
    joining: list[Flight] = []
    for flight in candidates:
        idle = not kept and not joining
        if flight.rows > free and not idle:
            break
        free -= flight.rows
        if flight.next_is_deep and not beats.get(flight.rhythm, True):
            continue
        joining.append(flight)
    return joining


def groups_of(running: Sequence[Flight], limits: Limits) -> Iterable[Group]:
    """The calls that give each of these its next step."""
    by_call: dict[tuple[Network, Shape], list[Flight]] = {}
    for flight in sorted(running, key=lambda f: f.id):
        network: Network = "unet_deep" if flight.next_is_deep else "unet_shallow"
        by_call.setdefault((network, flight.shape), []).append(flight)
    for (network, shape), members in by_call.items():
        for part in _split(members, limits.buckets[-1]):
            bucket = limits.bucket(sum(f.rows for f in part))
            yield Group(network, shape, tuple(f.id for f in part), bucket)


def _split(members: Sequence[Flight], largest: int) -> Iterable[list[Flight]]:
    part: list[Flight] = []
    for flight in members:
        if part and sum(f.rows for f in part) + flight.rows > largest:
            yield part
            part = []
        part.append(flight)
    if part:
        yield part
