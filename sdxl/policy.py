"""Plans the next tick: pure decisions over plain data.

`plan_tick` is the policy of the in-flight loop: which images join, which pause, which rows share a
UNet call, and the bucket of each call. The loop runs the plan, and cost.py runs the same policy
forward in time, so predictions match the loop. It knows no tensors, no engines and no clock.

Deep steps run together: a deep step waits while images that could share its call are about to reach
theirs. So images of all plans soon take deep steps in the same ticks, where newcomers join too.

Clients share a device by weighted fair queueing. Every image has a virtual time, `due`, at which it
would be done if all clients ran at once, each at the pace of its weight (fairness.py). Images in
their client's share of the rows go first, then those with the smallest virtual time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sdxl.flight import PLAIN, CallKey, Flight, Network, Priority, State
from sdxl.specs import Axes

PATIENCE = 2
"""shallow steps that a deep step waits for; each takes a few percent of the deep step's time"""


@dataclass(frozen=True)
class Limits:
    """The limits of one device's loop and queue."""

    buckets: tuple[int, ...]
    """row counts that calls are padded to, rising"""
    rows: int
    """rows in flight: the knee of the measured costs"""
    crowded_rows: int = 0
    """rows in flight under load, if more than `rows`: the least cost per row"""
    paused_cache_rows: int = 16
    """paused rows whose caches may stay in memory"""
    queue: int = 1000
    """standard images that one client may have waiting while no other client waits"""
    standard: Flight | None = None
    """the queue's unit of work; None: each image counts as one"""
    call_s: tuple[float, ...] = ()
    """measured seconds of a deep call by bucket; empty if unknown"""
    rides: bool = False
    """True if rows with and without LoRAs share calls. This is faster on a GPU, whose costs depend
    on the number of calls more than on the number of rows."""

    def __post_init__(self) -> None:
        if list(self.buckets) != sorted(set(self.buckets)) or self.buckets[-1] < 2:
            raise ValueError(f"buckets: {self.buckets}; expected rising row counts, the last >= 2")

    def bucket(self, rows: int) -> int:
        return next(size for size in self.buckets if size >= rows)

    @property
    def most_rows(self) -> int:
        """The most rows in flight under any load."""
        return max(self.rows, self.crowded_rows)

    def for_load(self, rows: int) -> Limits:
        """Return the limits while this many rows run or wait."""
        return self._crowded if self.rows < self.crowded_rows <= rows else self

    @cached_property
    def _crowded(self) -> Limits:
        return replace(self, rows=self.crowded_rows)

    def rows_at(self, slowdown: float) -> int:
        """Return the most rows in flight that slow an image's calls by at most this factor."""
        if not self.call_s:
            return self.rows
        timed = list(zip(self.buckets, self.call_s, strict=True))
        alone_s = next(seconds for bucket, seconds in timed if bucket >= 2)
        allowed = [b for b, s in timed if b <= self.rows and s <= alone_s * slowdown]
        return max(allowed, default=min(2, self.rows))


@dataclass(frozen=True)
class Group:
    """The images of one call, and the row count it is padded to."""

    call: CallKey
    ids: tuple[int, ...]
    bucket: int
    nets: tuple[Group, ...] = ()
    """the calls of ControlNets before this call"""
    places: tuple[int, ...] = ()
    """for a ControlNet's call, the net's index in each flight's `windows`"""

    @property
    def network(self) -> Network:
        return self.call.network


@dataclass(frozen=True)
class TickPlan:
    groups: tuple[Group, ...]
    admitted: tuple[int, ...] = ()
    """queued images that run from this tick on"""
    paused: tuple[int, ...] = ()
    resumed: tuple[int, ...] = ()
    expired: tuple[int, ...] = ()
    """images past their deadline"""
    is_settled: bool = False
    """True if, without new arrivals, the same images run until one is done or needs less room"""


def plan_tick(flights: Sequence[Flight], limits: Limits, now: float) -> TickPlan:
    """Plan a tick. `flights` are in order of arrival. Each running image takes a step, or waits
    until other images reach a deep step."""
    expired = tuple(f.id for f in flights if f.deadline_s < now)
    alive = [f for f in flights if f.deadline_s >= now] if expired else list(flights)
    active = _active_class(alive)
    kept, halted = _kept_and_paused(alive, active, limits)
    wanting = [f for f in alive if f.priority == active]
    limits = limits.for_load(sum(f.rows for f in wanting))
    shares = Shares.of(wanting, limits)
    paused = [f for f in alive if f.state is State.PAUSED]
    change = _join(wanting, kept, paused, shares, limits)
    left = {f.id for f in change.yielding}
    running = [*(f for f in kept if f.id not in left), *change.joining]
    unwanted = any(f.priority != active for f in kept)
    return TickPlan(
        groups=tuple(groups_of(stepping(running), limits)),
        admitted=tuple(f.id for f in change.joining if f.state is State.QUEUED),
        paused=(*(f.id for f in halted), *(f.id for f in change.yielding)),
        resumed=tuple(f.id for f in change.joining if f.state is State.PAUSED),
        expired=expired,
        is_settled=not (unwanted or change.is_pending or change.yielding),
    )


def foremost(flights: Iterable[Flight], limits: Limits) -> list[Flight]:
    """Return the flights that the next tick's plan can depend on, in order: only the first waiting
    flights of each client, as many as could run."""
    flights = list(flights)
    active = _active_class(flights)
    room: dict[str, int] = {}
    chosen: set[int] = set()
    for flight in sorted((f for f in flights if f.state is State.QUEUED), key=_turn):
        left = room.get(flight.client, limits.most_rows)
        if left > 0 and flight.priority == active:
            room[flight.client] = left - flight.rows
            chosen.add(flight.id)
    return [f for f in flights if f.state is not State.QUEUED or f.id in chosen]


@dataclass(frozen=True)
class Shares:
    """How clients share one device's rows."""

    within: frozenset[int]
    """ids of images within their client's share"""
    rows: int
    """the most rows in flight. They are reduced while a client wants less than its share, so that
    its images are not slowed down by another client's many images"""

    @classmethod
    def of(cls, flights: Sequence[Flight], limits: Limits) -> Shares:
        """Compute the shares of the flights that want to run."""
        weights = {f.client: f.weight for f in flights}
        if len(weights) <= 1:
            return cls(frozenset(f.id for f in flights), limits.rows)
        total = sum(weights.values())
        wanted = dict.fromkeys(weights, 0.0)
        for flight in flights:
            wanted[flight.client] += math.inf if flight.is_last else flight.rows
        light = {c: w for c, w in weights.items() if wanted[c] <= w / total * limits.rows}
        rows = limits.rows
        if light:
            # Allow half of the slowdown that the client's share of the time would allow, because a
            # newcomer has already waited for a call of many rows.
            rows = limits.rows_at((1 + total / max(light.values())) / 2)
        within, taken = set(), dict.fromkeys(weights, 0)
        for flight in sorted(flights, key=_turn):
            taken[flight.client] += flight.rows
            fits = taken[flight.client] <= flight.weight / total * rows
            if (fits or flight.client in light) and not flight.is_last:
                within.add(flight.id)
        return cls(frozenset(within), rows)

    def rank(self, flight: Flight) -> tuple[bool, float, bool, int]:
        """Return a sort key; the smallest goes first."""
        return flight.id not in self.within, *_turn(flight)


def _turn(flight: Flight) -> tuple[float, bool, int]:
    return flight.due, flight.state is State.QUEUED, flight.id


def line(flights: Iterable[Flight], limits: Limits) -> list[Flight]:
    """Return the flights that wait for their first step, in the order of the queue."""
    waiting = [f for f in flights if f.state is State.QUEUED]
    shares = Shares.of(waiting, limits)
    return sorted(waiting, key=lambda f: (f.priority, *shares.rank(f)))


def _active_class(flights: Iterable[Flight]) -> Priority | None:
    """Return the most urgent priority among the flights."""
    return min((f.priority for f in flights), default=None)


def _kept_and_paused(
    flights: Sequence[Flight], active: Priority | None, limits: Limits
) -> tuple[list[Flight], list[Flight]]:
    """Return the running images that keep running, and the less urgent ones, which pause.

    If too many caches are in memory already, an image with a cache runs until its next deep step,
    which needs no cache, and pauses there.
    """
    cached = sum(_cache_rows(f) for f in flights if f.state is State.PAUSED)
    kept, halted = [], []
    for flight in flights:
        if flight.state is not State.RUNNING:
            continue
        rows = _cache_rows(flight)
        can_pause = not rows or cached + rows <= limits.paused_cache_rows
        if flight.priority == active or not can_pause:
            kept.append(flight)
        else:
            cached += rows
            halted.append(flight)
    return kept, halted


def _cache_rows(flight: Flight) -> int:
    return flight.next_step.rows if flight.needs_cache else 0


@dataclass(frozen=True)
class _Change:
    joining: Sequence[Flight] = ()
    yielding: Sequence[Flight] = ()
    """running images that pause for the joining ones"""
    is_pending: bool = False
    """True if an image has a place but must wait for other images' deep step or for memory"""


def _join(
    wanting: Sequence[Flight],
    kept: Sequence[Flight],
    paused: Sequence[Flight],
    shares: Shares,
    limits: Limits,
) -> _Change:
    """Choose the waiting images that join, by rank, while rows are free or can be freed.

    The order is strict: the first image without a place ends the search, so large images do not
    starve. An image keeps its place while it waits until others reach a deep step.
    """
    joining: list[Flight] = []
    yielding: list[Flight] = []
    staying, taken, is_pending = list(kept), sum(f.rows for f in kept), False
    for flight in sorted((f for f in wanting if f.state is not State.RUNNING), key=shares.rank):
        most = limits.rows if flight.id in shares.within else shares.rows
        others = _yielding(flight, taken + flight.rows - shares.rows, staying, shares)
        freed = sum(f.rows for f in others)
        if taken + flight.rows - freed > most and (staying or joining):
            break
        rest = [f for f in staying if f not in others]
        is_ready = not _must_wait(flight, _awaited(rest)) and _can_all_pause(
            others, [*paused, *yielding], flight.priority, limits
        )
        if is_ready:
            joining.append(flight)
            yielding += others
            staying, taken = rest, taken + flight.rows - freed
        elif others:
            # The running images continue until this one can join; no image overtakes it.
            is_pending = True
            break
        else:
            is_pending = True
            taken += flight.rows
    return _Change(joining, yielding, is_pending)


def _yielding(
    flight: Flight, excess: int, staying: Sequence[Flight], shares: Shares
) -> list[Flight]:
    """Return the running images of lower rank that pause for this one, the lowest first, until
    `excess` rows are free. An image pauses others of its client only if it is in a later leg: it
    had rows before."""
    rank, chosen = shares.rank(flight), list[Flight]()
    if excess <= 0 or flight.is_last:
        return chosen
    for other in sorted(staying, key=shares.rank, reverse=True):
        if excess <= 0 or shares.rank(other) < rank:
            break
        if other.client != flight.client or flight.is_later:
            chosen.append(other)
            excess -= other.rows
    return chosen


def _can_all_pause(
    flights: Sequence[Flight], paused: Sequence[Flight], active: Priority, limits: Limits
) -> bool:
    """True if these flights may pause beside the paused ones: all caches are limited, and the rows
    of the active priority."""
    if not flights:
        return True
    together = [*paused, *flights]
    caches = sum(_cache_rows(f) for f in together)
    is_small = caches <= limits.paused_cache_rows or not any(map(_cache_rows, flights))
    return is_small and sum(f.rows for f in together if f.priority == active) <= limits.rows


def stepping(running: Sequence[Flight]) -> list[Flight]:
    awaited = _awaited(running)
    return [f for f in running if not _must_wait(f, awaited)]


def _awaited(running: Iterable[Flight]) -> set[object]:
    """Return the batch keys of images that are about to reach a deep step."""
    return {f.batch_key for f in running if 0 < f.to_deep <= PATIENCE}


def _must_wait(flight: Flight, awaited: Container[object]) -> bool:
    return flight.next_is_deep and flight.batch_key in awaited


def groups_of(running: Sequence[Flight], limits: Limits) -> Iterable[Group]:
    """Yield the calls for the next step of each image."""
    by_call: dict[CallKey, list[Flight]] = {}
    for flight in sorted(running, key=lambda f: f.id):
        network: Network = "unet_deep" if flight.next_is_deep else "unet_shallow"
        call = flight.call(network)
        shared = call._replace(variant=PLAIN) if flight.rides else call
        by_call.setdefault(shared, []).append(flight)
    for call, members in by_call.items():
        for part in _split(members, limits.buckets[-1]):
            bucket = limits.bucket(sum(f.next_step.rows for f in part))
            ids, nets = tuple(f.id for f in part), tuple(_net_groups(call.axes, part, limits))
            yield Group(_joined(call, part), ids, bucket, nets)


def _net_groups(axes: Axes, members: Sequence[Flight], limits: Limits) -> Iterable[Group]:
    """Yield the calls of ControlNets before the next deep step of these images, sorted by net, so
    that residuals are summed in one order. A net is called once for each map of an image."""
    by_turn: dict[tuple[str, int], list[tuple[Flight, int, int]]] = {}
    for flight in members:
        turns = Counter[str]()
        for place, window in flight.nets:
            turn, turns[window.net] = turns[window.net], turns[window.net] + 1
            entry = flight, place, window.rows(flight.next_step.rows)
            by_turn.setdefault((window.net, turn), []).append(entry)
    for (net, _), entries in sorted(by_turn.items(), key=lambda each: each[0]):
        flights, places, rows = zip(*entries, strict=True)
        call = CallKey("control_deep", axes, net=net)
        ids = tuple(f.id for f in flights)
        yield Group(call, ids, limits.bucket(sum(rows)), places=places)


def _joined(call: CallKey, members: Sequence[Flight]) -> CallKey:
    """Return the call with the least variant that runs all members."""
    variant = call.variant
    for flight in members:
        variant = variant.joined(flight.step_variant.of(call.network))
    return call._replace(variant=variant)


def _split(members: Sequence[Flight], largest: int) -> Iterable[list[Flight]]:
    part: list[Flight] = []
    for flight in members:
        if part and sum(f.next_step.rows for f in part) + flight.next_step.rows > largest:
            yield part
            part = []
        part.append(flight)
    if part:
        yield part
