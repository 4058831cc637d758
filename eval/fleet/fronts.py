"""The front ends of a fleet and how they choose replicas, many decisions at a time.

Each front end routes within its cluster, by the last reports that it asked for. A request reaches
any front end with equal chance. All policies get the same reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sdxl.fleet import ASK_PERIOD_S, ASKED, Loads, hashed, homes, replicas_to_ask

STEP_S = 0.05
TURNS = round(ASK_PERIOD_S / STEP_S)
"""steps of the simulation between two questions of a front end"""
SHELF = (64, 8)
"""LoRAs and ControlNets that an H200 keeps"""
OURS, ROUND_ROBIN, LEAST_QUEUED, SHORTEST = "ours", "round robin", "least queued", "shortest queue"
POLICIES = (ROUND_ROBIN, LEAST_QUEUED, SHORTEST, OURS)


@dataclass(frozen=True)
class Shape:
    """A fleet's processes."""

    clusters: int
    replicas: int
    """of a cluster"""
    fronts: int
    """of a cluster"""

    @property
    def all_replicas(self) -> int:
        return self.clusters * self.replicas

    @property
    def all_fronts(self) -> int:
        return self.clusters * self.fronts


@dataclass
class Fronts:
    shape: Shape
    policy: str
    loading_s: Any
    """seconds to load each file; empty to ignore files"""
    rng: Any

    def __post_init__(self) -> None:
        size = self.shape.all_fronts * self.shape.replicas
        self.loads, self.waiting, self.present = Loads(size), np.zeros(size), np.zeros(size)
        self.turn = self.rng.integers(self.shape.replicas, size=self.shape.all_fronts)
        self.hashes = np.array([hashed(str(i)) for i in range(self.shape.replicas)], np.uint64)
        self.asked = np.zeros((self.shape.all_fronts, min(ASKED, self.shape.replicas)), int)
        self.resize(self.shape.replicas)

    def resize(self, active: int) -> None:
        """Send requests to the first `active` replicas of each cluster."""
        self.active = active
        files = [hashed(f"file {i}") for i in range(len(self.loading_s))]
        self.homes = np.array([homes(f, self.hashes[:active]) for f in files])

    def _first_replica(self, front: Any) -> Any:
        """The first replica of each front end's cluster."""
        return front // self.shape.fronts * self.shape.replicas

    def report(self, fronts: Any, now: float, outlook: Any, waiting: Any, present: Any) -> None:
        """Each of these front ends asks some replicas and stores their reports."""
        local = replicas_to_ask(self.active, len(fronts), self.rng)
        self.asked[fronts, : local.shape[1]], self.count = local, local.shape[1]
        places = fronts[:, None] * self.shape.replicas + local
        replicas = self._first_replica(fronts)[:, None] + local
        fresh = [each[replicas] for each in outlook]
        self.loads.report(places, now, fresh, self.loads.sent[places])
        self.waiting[places], self.present[places] = waiting[replicas], present[replicas]

    def choose(self, fronts: Any, files: Any, now: float) -> Any:
        """Choose a replica for one picture of each front end. The front ends are distinct. `files`:
        the file that decides the picture's placement, or NONE."""
        base = fronts * self.shape.replicas
        if self.policy == ROUND_ROBIN:
            self.turn[fronts] = (self.turn[fronts] + 1) % self.active
            local = self.turn[fronts]
        elif self.policy == OURS:
            local = np.empty_like(fronts)
            needs_file = files >= 0 if len(self.loading_s) else np.zeros(len(fronts), bool)
            for part in (needs_file, ~needs_file):
                if part.any():
                    local[part] = self._earliest(fronts[part], files[part], now, part is needs_file)
        else:
            known = self.waiting if self.policy == LEAST_QUEUED else self.present
            places = base[:, None] + self.asked[fronts, : self.count]
            count = known[places] + self.loads.sent[places]
            best = (count + 0.5 * self.rng.random(count.shape)).argmin(-1)
            local = np.take_along_axis(places, best[:, None], 1)[:, 0] - base
        self.loads.sent[base + local] += 1
        return self._first_replica(fronts) + local

    def _earliest(self, fronts: Any, files: Any, now: float, needs_file: bool) -> Any:
        base = fronts[:, None] * self.shape.replicas
        kept, loading_s = np.empty((len(fronts), 0), int), 0.0
        if needs_file:
            kept, loading_s = base + self.homes[files], self.loading_s[files][:, None]
        places = base + self.asked[fronts, : self.count]
        few, ready_s = self.loads.candidates(places, now, kept, loading_s, self.rng)
        return few[np.arange(len(few)), ready_s.argmin(-1)] - base[:, 0]
