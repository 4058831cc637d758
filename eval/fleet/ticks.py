"""A small fleet, tick by tick: each replica runs the loop's own policy and admission."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eval.fleet.fronts import SHELF, STEP_S, TURNS, Fronts
from eval.fleet.gpus import SimulatedGpu
from eval.fleet.outcome import Outcome
from eval.fleet.traffic import DEADLINE_S, LOADING_S, LORA_LOAD_S, LORAS, Traffic
from sdxl.admission import Admission, Refused
from sdxl.cost import CostKey
from sdxl.fairness import VirtualTime
from sdxl.fleet import Outlook
from sdxl.flight import Flight, State
from sdxl.policy import Group, plan_tick

CLIENTS = 100


@dataclass
class TickReplica:
    """One device: does what sdxl/inflight.py and serve/worker do, without tensors and threads."""

    gpu: SimulatedGpu
    flights: dict[int, Flight] = field(default_factory=dict)
    coming: dict[int, tuple[float, Flight]] = field(default_factory=dict)
    """admitted pictures by id: when each joins the loop, and its flight"""
    time: VirtualTime = field(default_factory=VirtualTime)
    is_idle: bool = True
    next_s: float = math.inf
    """when the next tick begins"""
    shelves: tuple[OrderedDict[int, None], ...] = field(
        default_factory=lambda: (OrderedDict(), OrderedDict())
    )

    def admission(self, now: float, delay_s: float = 0.0) -> Admission:
        flights = (*self.flights.values(), *(flight for _, flight in self.coming.values()))
        costs = self.gpu.costs
        return Admission(flights, self.gpu.limits, costs, now, costs.encode_s + delay_s)

    def admit(self, flight: Flight, file: int, now: float) -> float:
        """Accept a picture and return when it joins the loop, or raise Refused."""
        delay_s = self._loading_s(file)
        admission = self.admission(now, delay_s)
        promised = admission.admit(flight, self.time)
        at_s = now + admission.delay_s
        self.coming[promised.id] = at_s, promised
        return at_s

    def _loading_s(self, file: int) -> float:
        if file < 0:
            return 0.0
        shelf, most = self.shelves[file >= LORAS], SHELF[file >= LORAS]
        is_loaded = file in shelf
        shelf[file] = None
        shelf.move_to_end(file)
        if len(shelf) > most:
            shelf.popitem(last=False)
        return 0.0 if is_loaded else float(LOADING_S[file])

    def outlook(self, now: float) -> Outlook:
        return Outlook.of(self.admission(now), self.gpu.standard)

    def tick(self, now: float) -> tuple[float, list[tuple[int, float]]]:
        """Run a tick. Return its end, and the ended pictures with the times when they are ready,
        infinite for expired ones. Without work, the end is when the next picture joins."""
        for id_ in [id_ for id_, (at_s, _) in self.coming.items() if at_s <= now]:
            self.flights[id_] = self.coming.pop(id_)[1]
        plan = plan_tick(tuple(self.flights.values()), self.gpu.limits, now)
        ended = [(id_, math.inf) for id_ in plan.expired]
        for id_ in plan.expired:
            self._drop(id_)
        for id_ in plan.paused:
            self.flights[id_] = self.flights[id_].changed(state=State.PAUSED)
        for id_ in (*plan.admitted, *plan.resumed):
            self.flights[id_] = self.flights[id_].changed(state=State.RUNNING)
        for group in plan.groups:
            now += self._seconds(group)
            for id_ in group.ids:
                moved = self.flights[id_] = self.flights[id_].advanced()
                if moved.is_done:
                    ended.append((id_, now + self.gpu.costs.decoded_s(moved, self.gpu.limits)))
                    self._drop(id_)
        self.is_idle = not plan.groups
        if self.is_idle:
            now = min((at_s for at_s, _ in self.coming.values()), default=math.inf)
        return now, ended

    def _seconds(self, group: Group) -> float:
        """Seconds of a call and its ControlNets' calls. An unmeasured call is estimated once."""
        costs = self.gpu.costs
        for call in (*group.nets, group):
            key = CostKey(call.call, call.bucket)
            costs.ticks.setdefault(key, costs.device_s(key))
        return costs.tick_s(group)

    def _drop(self, id_: int) -> None:
        gone = self.flights.pop(id_)
        for moved in self.time.leave(gone, list(self.flights.values())):
            self.flights[moved.id] = moved


class TickFleet:
    """Draws the same requests as a Flow of the same seed."""

    def __init__(self, gpu: SimulatedGpu, traffic: Traffic, fronts: Fronts, seed: int = 1) -> None:
        self.gpu, self.traffic, self.fronts, self.out = gpu, traffic, fronts, Outcome()
        self.trace, self.rng = np.random.default_rng(seed).spawn(2)
        self.replicas = [TickReplica(gpu) for _ in range(fronts.shape.all_replicas)]
        self.ids, self.came_s = itertools.count(), dict[int, float]()
        self.ticks: list[tuple[float, int]] = []
        """a heap of the next tick's begin and the replica's number"""

    def run(self, seconds: float, warm_s: float = 0.0) -> Outcome:
        """Return the outcome of `seconds`, after `warm_s` in which the caches of files fill."""
        for step in range(round((warm_s + seconds) / STEP_S)):
            now = step * STEP_S
            if step == round(warm_s / STEP_S):
                self.out = Outcome(gpu_s=seconds * len(self.replicas))
            self._run_ticks(now)
            self._ask(step, now)
            came_s, kinds, files = self.traffic.arrivals(self.trace, now, STEP_S)
            self.out.arrived += len(kinds)
            fronts = self.trace.integers(self.fronts.shape.all_fronts, size=len(kinds))
            for at_s, kind, file, front in zip(came_s, kinds, files, fronts, strict=True):
                self._run_ticks(at_s)
                self._send(float(at_s), int(kind), np.array([file]), np.array([front]))
        return self.out

    def _send(self, at_s: float, kind: int, file: Any, front: Any) -> None:
        number = int(self.fronts.choose(front, file, at_s)[0])
        replica, id_ = self.replicas[number], next(self.ids)
        flight = self.traffic.kinds[kind].flight.changed(
            id=id_,
            deadline_s=at_s + DEADLINE_S,
            client=str(self.rng.integers(CLIENTS)),
            request_id=str(id_),
        )
        try:
            joins_s = replica.admit(flight, int(file[0]), at_s)
            self.out.loads += joins_s - at_s > self.gpu.costs.encode_s + LORA_LOAD_S / 2
        except Refused:
            self.out.refused += 1
            return
        self.came_s[id_] = at_s
        if replica.is_idle and joins_s < replica.next_s:
            self._plan(number, joins_s)

    def _run_ticks(self, until_s: float) -> None:
        while self.ticks and self.ticks[0][0] <= until_s:
            now, number = heapq.heappop(self.ticks)
            replica = self.replicas[number]
            if now != replica.next_s:
                # An earlier tick replaced this one.
                continue
            next_s, ended = replica.tick(now)
            self.out.note(np.array([ready_s - self.came_s.pop(id_) for id_, ready_s in ended]))
            self._plan(number, next_s)

    def _plan(self, number: int, next_s: float) -> None:
        self.replicas[number].next_s = next_s
        if next_s < math.inf:
            heapq.heappush(self.ticks, (next_s, number))

    def _ask(self, step: int, now: float) -> None:
        fronts = np.arange(step % TURNS, self.fronts.shape.all_fronts, TURNS)
        if not len(fronts):
            return
        each = [replica.outlook(now) for replica in self.replicas]
        outlooks = np.array([(o.ready_in_s, o.alone_s, o.each_s) for o in each]).T
        present = [[*r.flights.values(), *(f for _, f in r.coming.values())] for r in self.replicas]
        waiting = [sum(f.state is State.QUEUED for f in flights) for flights in present]
        counts = np.array(waiting), np.array([len(flights) for flights in present])
        self.fronts.report(fronts, now, outlooks, *counts)
