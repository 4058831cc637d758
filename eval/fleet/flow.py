"""A large fleet, picture by picture, in steps of time for all replicas at once.

A replica is a queue, and pictures in flight that advance together at the pace of full calls. Ticks
are not simulated; `sdxl bench fleet --sections check` shows the distance to ticks.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eval.fleet.calibration import Pace
from eval.fleet.fronts import SHELF, STEP_S, TURNS, Fronts
from eval.fleet.gpus import SimulatedGpu
from eval.fleet.outcome import Outcome
from eval.fleet.traffic import DEADLINE_S, LOADING_S, LORAS, Traffic

ROOM = 256
"""the most waiting pictures of a replica: more than can be in time"""
SILENT_S, LEFT_S = 1.5, 2.5
"""seconds until a dead replica gets no more pictures, and until its pictures are sent elsewhere
(serve/fleet/liveness.py, beats.py)"""


CAME, WORK, FILE = range(3)
"""the rows of an array of pictures: arrival, work in mean pictures, file"""


class Flow:
    def __init__(
        self,
        gpu: SimulatedGpu,
        pace: Pace,
        traffic: Traffic,
        fronts: Fronts,
        *,
        seed: int = 1,
        hours_to_failure: float = np.inf,
        cold_s: float = 90.0,
    ) -> None:
        self.traffic, self.fronts, self.shape = traffic, fronts, fronts.shape
        self.pace, self.out = pace, Outcome()
        self.trace, self.rng = np.random.default_rng(seed).spawn(2)
        self.cold_s, self.failure = cold_s, STEP_S / 3600 / hours_to_failure
        n, most, costs = self.shape.all_replicas, pace.most, gpu.costs
        self.full_s = 1 / pace.rate
        self.fixed_s = costs.encode_s + costs.decode_s
        self.step, self.now, self.arrived_work = 0, 0.0, 0.0
        self.advanced, self.queued, self.left = np.zeros((3, n))
        """work of each replica, in mean pictures: done since the start for each picture in flight;
        waiting; left in flight"""
        self.ends, self.flying = np.full((n, most), np.inf), np.zeros((3, n, most))
        self.queue = np.zeros((3, n, ROOM))
        self.head, self.waiting, self.running = np.zeros((3, n), int)
        self.up_s = np.full(n, -np.inf)
        """when the replica began or begins to work"""
        self.silent_s = np.full(n, np.inf)
        """from when on front ends know that the replica does not work"""
        self.later = np.zeros((5, 0))
        """pictures on the way: arrival, replica (−1 − cluster: any), and a picture's three rows"""
        self.used_s = np.full((n, len(LOADING_S)), -np.inf, np.float32)
        """when each loaded file was used last"""

    def run(self, seconds: float, warm_s: float = 0.0) -> Outcome:
        """Return the outcome of `seconds`, after `warm_s` in which the caches of files fill."""
        for each_s in (warm_s, seconds):
            self.out = Outcome(gpu_s=each_s * self.shape.all_replicas)
            for _ in range(round(each_s / STEP_S)):
                self.advance()
        return self.out

    def advance(self) -> None:
        self.now = self.step * STEP_S
        self._finish()
        came_s, kind, file = self.traffic.arrivals(self.trace, self.now, STEP_S)
        self.out.arrived += len(kind)
        self.arrived_work += self.pace.work[kind].sum()
        front = self.trace.integers(self.shape.all_fronts, size=len(kind))
        new = np.array([came_s, self.pace.work[kind], file])
        self._fail()
        self._ask()
        is_due = self.later[0] <= self.now
        due, self.later = self.later[1:, is_due], self.later[:, ~is_due]
        lost = due[:, due[0] < 0]
        first_front = (-1 - lost[0]).astype(int) * self.shape.fronts
        new_front = first_front + self.rng.integers(self.shape.fronts, size=len(first_front))
        new = np.concatenate([new, lost[1:]], 1)
        replica = self._route(np.concatenate([front, new_front]), new[FILE].astype(int))
        is_here = self._load(replica, new)
        loaded = due[:, due[0] >= 0]
        replica = np.concatenate([replica[is_here], loaded[0].astype(int)])
        self._accept(replica, np.concatenate([new[:, is_here], loaded[1:]], 1))
        self._start()
        self.step += 1

    def _finish(self) -> None:
        taken = STEP_S / self.pace.picture_s[self.running]
        self.advanced += taken
        np.maximum(self.left - taken * self.running, 0.0, out=self.left)
        replica, slot = np.nonzero(self.ends <= self.advanced[:, None])
        over = self.advanced[replica] - self.ends[replica, slot]
        ended_s = self.now - over * self.pace.picture_s[self.running[replica]] + self.fixed_s
        self.out.note(ended_s - self.flying[CAME, replica, slot])
        self.ends[replica, slot] = np.inf
        np.subtract.at(self.running, replica, 1)

    def _fail(self) -> None:
        """Replicas fail, lose their pictures and start again."""
        if not self.failure:
            return
        for one in np.flatnonzero(self.rng.random(len(self.up_s)) < self.failure):
            is_flying = np.isfinite(self.ends[one])
            places = (self.head[one] + np.arange(self.waiting[one])) % ROOM
            flying, waiting = self.flying[:, one, is_flying], self.queue[:, one, places]
            pictures = np.concatenate([flying, waiting], 1)
            self._send_elsewhere(np.full(pictures.shape[1], one), pictures)
            self.ends[one] = np.inf
            self.waiting[one] = self.running[one] = 0
            self.queued[one] = self.left[one] = 0.0
            self.start(one, SILENT_S)

    def start(self, replicas: Any, noticed_s: float = 0.0) -> None:
        """Start replicas without loaded files."""
        self.used_s[replicas] = -np.inf
        self.up_s[replicas] = self.now + self.cold_s
        self.silent_s[replicas] = self.now + noticed_s

    def _send_elsewhere(self, replica: Any, pictures: Any) -> None:
        clusters = replica // self.shape.replicas
        when = np.full(len(replica), self.now + LEFT_S)
        self.later = np.concatenate([self.later, np.array([when, -1 - clusters, *pictures])], 1)

    def _ask(self) -> None:
        """Each front end asks every ASK_PERIOD_S, some in each step."""
        fronts = np.arange(self.step % TURNS, self.shape.all_fronts, TURNS)
        if len(fronts):
            present = self.running + self.waiting
            self.fronts.report(fronts, self.now, self.outlook(), self.waiting, present)

    def outlook(self) -> Any:
        alone_s = np.full_like(self.left, self.pace.picture_s[1])
        ready_s = alone_s + (self.left + self.queued) * self.full_s
        ready_s[(self.up_s > self.now) & (self.silent_s <= self.now)] = np.inf
        return ready_s, alone_s, np.full_like(alone_s, self.full_s)

    def _route(self, front: Any, file: Any) -> Any:
        """Choose replicas: all front ends in parallel, each for one picture after another."""
        order = np.argsort(front, kind="stable")
        turn, replica = np.empty((2, len(front)), int)
        turn[order] = places_in_run(front[order])
        for number in range(turn.max(initial=-1) + 1):
            pictures = np.flatnonzero(turn == number)
            choice = self.fronts.choose(front[pictures], file[pictures], self.now)
            replica[pictures] = choice
        return replica

    def _load(self, replica: Any, pictures: Any) -> Any:
        """Return whether each picture's file is loaded; the other pictures arrive after loading."""
        file = pictures[FILE].astype(int)
        named = np.flatnonzero(file >= 0)
        which = replica[named], file[named]
        is_missing = np.isinf(self.used_s[which])
        self.used_s[which] = self.now
        missing = named[is_missing]
        self.out.loads += len(missing)
        for files, most in zip((slice(LORAS), slice(LORAS, None)), SHELF, strict=True):
            self._evict(np.unique(replica[missing]), files, most)
        when = self.now + LOADING_S[file[missing]]
        coming = np.array([when, replica[missing], *pictures[:, missing]])
        self.later = np.concatenate([self.later, coming], 1)
        is_here = np.ones(len(file), bool)
        is_here[missing] = False
        return is_here

    def _evict(self, replicas: Any, files: slice, most: int) -> None:
        """Drop the least recently used files beyond `most`."""
        used_s = self.used_s[replicas, files]
        over = np.isfinite(used_s).sum(1) > most
        if over.any():
            oldest = -np.partition(-used_s[over], most, axis=1)[:, most]
            kept = used_s[over] > oldest[:, None]
            self.used_s[replicas[over], files] = np.where(kept, used_s[over], -np.inf)

    def _accept(self, replica: Any, pictures: Any) -> None:
        is_down = self.up_s[replica] > self.now
        self._send_elsewhere(replica[is_down], pictures[:, is_down])
        ready_s = self.now + (self.queued + self.left)[replica] * self.full_s
        # At worst the picture shares the device with the most pictures in flight.
        ready_s += pictures[WORK] * self.pace.picture_s[self.pace.most]
        is_late = ready_s > pictures[CAME] + DEADLINE_S
        self.out.refused += int(np.count_nonzero(is_late & ~is_down))
        is_in = ~(is_down | is_late)
        replica, pictures = replica[is_in], pictures[:, is_in]
        order = np.argsort(replica, kind="stable")
        replica, pictures = replica[order], pictures[:, order]
        place = (self.head + self.waiting)[replica] + places_in_run(replica)
        self.queue[:, replica, place % ROOM] = pictures
        np.add.at(self.waiting, replica, 1)
        np.add.at(self.queued, replica, pictures[WORK])

    def _start(self) -> None:
        is_crowded = self.running + self.waiting >= self.pace.most
        room = np.where(is_crowded, self.pace.most, self.pace.usual)
        while len(one := np.flatnonzero((self.waiting > 0) & (self.running < room))):
            slot = np.isinf(self.ends[one]).argmax(1)
            picture = self.queue[:, one, self.head[one] % ROOM]
            self.ends[one, slot] = self.advanced[one] + picture[WORK]
            self.flying[:, one, slot] = picture
            self.head[one] += 1
            self.waiting[one] -= 1
            self.running[one] += 1
            self.queued[one] -= picture[WORK]
            self.left[one] += picture[WORK]


def places_in_run(values: Any) -> Any:
    """The index of each value in its run of equal values."""
    is_first = np.r_[True, values[1:] != values[:-1]][: len(values)]
    begins = np.flatnonzero(is_first)
    return np.arange(len(values)) - np.repeat(begins, np.diff(np.r_[begins, len(values)]))
