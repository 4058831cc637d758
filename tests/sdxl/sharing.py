"""A replica's admission and policy in simulated time: real decisions, and calls that only take
time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from sdxl.admission import Admission, Refused
from sdxl.cost import CostKey, Costs
from sdxl.deepcache import plan
from sdxl.fairness import VirtualTime
from sdxl.flight import Flight, Leg, Network, Priority, State
from sdxl.policy import Limits, plan_tick
from sdxl.specs import Axes
from tests.fakes import axes

SHAPE = axes(64, 64)
BUCKETS = (1, 2, 4, 6, 8, 12)
STANDARD = Flight(-1, SHAPE, plan(20, 2))


def device_costs(base_s: float = 0.010, row_s: float = 0.010) -> Costs:
    """The costs of a device on which each further row costs time, and fuller calls pay."""
    networks: tuple[tuple[Network, float], ...] = (("unet_deep", 1.0), ("unet_shallow", 0.1))
    ticks = {
        CostKey(STANDARD.call(network), bucket): share * (base_s + row_s * bucket)
        for network, share in networks
        for bucket in BUCKETS
    }
    return Costs(ticks)


@dataclass
class Device:
    """One replica. Time passes only in calls, and while there is no work."""

    rows: int = 12
    queue: int = 64
    costs: Costs = field(default_factory=device_costs)
    now: float = 0.0
    flights: dict[int, Flight] = field(default_factory=dict)
    promised: dict[int, float] = field(default_factory=dict)
    on_end: dict[int, Callable[[bool], None]] = field(default_factory=dict)
    worked: dict[str, float] = field(default_factory=dict)
    """seconds of work in finished images, by client"""
    idle_s: float = 0.0
    broken: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        calls = tuple(self.costs.ticks[CostKey(STANDARD.call("unet_deep"), b)] for b in BUCKETS)
        self.limits = Limits(BUCKETS, self.rows, queue=self.queue, standard=STANDARD, call_s=calls)
        self.time = VirtualTime()
        self.ids = itertools.count()

    @property
    def admission(self) -> Admission:
        return Admission(tuple(self.flights.values()), self.limits, self.costs, self.now)

    def submit(self, wanted: Flight, on_end: Callable[[bool], None]) -> int:
        taken = self.admission.admit(replace(wanted, id=next(self.ids)), self.time)
        self.flights[taken.id], self.on_end[taken.id] = taken, on_end
        return taken.id

    def drop(self, id_: int) -> None:
        gone = self.flights.pop(id_, None)
        if gone is not None:
            for moved in self.time.leave(gone, list(self.flights.values())):
                self.flights[moved.id] = moved

    def tick(self) -> bool:
        """Run a tick; return whether there was work."""
        decided = plan_tick(list(self.flights.values()), self.limits, self.now)
        for id_ in decided.expired:
            flight = self.flights[id_]
            self.broken.append(f"{flight.client}: due {flight.deadline_s:.2f}, is {self.now:.2f}")
            self.drop(id_)
            self.on_end.pop(id_)(False)
        for ids, state in (
            ((*decided.admitted, *decided.resumed), State.RUNNING),
            (decided.paused, State.PAUSED),
        ):
            for id_ in ids:
                self.flights[id_] = replace(self.flights[id_], state=state)
        self.now += sum(self.costs.tick_s(group) for group in decided.groups)
        for id_ in [id_ for group in decided.groups for id_ in group.ids]:
            flight = self.flights[id_] = self.flights[id_].advanced()
            if flight.is_done:
                self.drop(id_)
                own_s = flight.work_s - (flight.later.work_s if flight.later else 0.0)
                self.worked[flight.client] = self.worked.get(flight.client, 0.0) + own_s
                if flight.later:
                    self.flights[id_] = flight.next_leg
                else:
                    self.on_end.pop(id_)(True)
        return bool(decided.groups)


@dataclass
class World:
    """Clients and devices on one clock. An order goes to the device with the earliest ETA."""

    devices: list[Device]
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    order: Iterator[int] = field(default_factory=itertools.count)

    @property
    def now(self) -> float:
        return min(device.now for device in self.devices)

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when_s, next(self.order), call))

    def choose(self) -> Device:
        one = replace(STANDARD, client="?")
        return min(self.devices, key=lambda d: max(d.admission.ready_s(one), self.now))

    def run(self, until_s: float) -> None:
        while self.now < until_s:
            device = min(self.devices, key=lambda d: d.now)
            while self.events and self.events[0][0] <= device.now:
                heapq.heappop(self.events)[2]()
            if not device.tick():
                others = [d.now for d in self.devices if d is not device and d.now > device.now]
                due = [self.events[0][0]] if self.events else []
                then = min([*due, *others, until_s])
                device.idle_s += max(then - device.now, 0.0)
                device.now = max(then, device.now)


@dataclass
class Caller:
    """A client: each of its connections asks, waits for the answer, pauses, and asks again."""

    world: World
    name: str
    connections: int = 1
    n: int = 1
    steps: int = 20
    axes: Axes = SHAPE
    later: Leg | None = None
    weight: float = 1.0
    pause_s: Callable[[], float] = lambda: 0.0
    deadline_s: float = 20.0
    priority: Priority = Priority.INTERACTIVE
    begins_s: float = 0.0
    latencies: list[float] = field(default_factory=list)
    images: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        self.requests = itertools.count()
        for _ in range(self.connections):
            self.world.at(self.begins_s, self.ask)

    def ask(self) -> None:
        """All of a request's images are made, or none."""
        began = self.world.now
        taken: list[tuple[Device, int]] = []
        left = self.n
        request = f"{self.name} {next(self.requests)}"

        def ended(is_done: bool) -> None:
            nonlocal left
            left -= 1
            self.images += is_done
            if left == 0:
                self.latencies.append(self.world.now - began)
                self.world.at(self.world.now + self.pause_s(), self.ask)

        for _ in range(self.n):
            device = self.world.choose() if len(self.world.devices) > 1 else self.world.devices[0]
            wanted = Flight(
                -1,
                self.axes,
                plan(self.steps, 2),
                priority=self.priority,
                deadline_s=device.now + self.deadline_s,
                client=self.name,
                weight=self.weight,
                request_id=request,
                later=self.later,
            )
            try:
                taken.append((device, device.submit(wanted, ended)))
            except Refused as refusal:
                self.refused += 1
                for where, id_ in taken:
                    where.drop(id_)
                    where.on_end.pop(id_, None)
                # The client reads whole seconds, at least one.
                wait_s = max(1, math.ceil(refusal.retry_after_s))
                self.world.at(self.world.now + wait_s, self.ask)
                return


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]
