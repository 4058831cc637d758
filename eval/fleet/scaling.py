"""A cluster whose replicas follow the load by the rule and delays of serve/fleet/autoscaling.py."""

from __future__ import annotations

from collections import deque

import numpy as np

from eval.fleet.flow import Flow
from eval.fleet.fronts import STEP_S
from eval.fleet.outcome import Outcome
from sdxl.fleet import replicas_needed

LOOK_S, UP_S, DOWN_S = 20, 10, 300
TARGET_S = 2.0
"""the service's target_queue_s"""


class ScaledFlow:
    def __init__(self, flow: Flow, begin: int) -> None:
        self.flow, self.active = flow, begin
        self.work = deque[float](maxlen=LOOK_S)
        """GPU seconds of work that arrived in each second"""
        self.wanted = deque[float](maxlen=DOWN_S)
        """replicas needed in each of the last seconds"""
        flow.fronts.resize(begin)

    def run(self, seconds: int) -> Outcome:
        flow = self.flow
        for _ in range(seconds):
            before = flow.arrived_work
            for _ in range(round(1 / STEP_S)):
                flow.advance()
            self.work.append((flow.arrived_work - before) * flow.full_s)
            arriving, queued = sum(self.work) / len(self.work), float(flow.queued.sum())
            self.wanted.append(replicas_needed([arriving], [queued * flow.full_s], TARGET_S))
            self._resize()
            draining = np.count_nonzero((flow.running + flow.waiting)[self.active :])
            flow.out.gpu_s += self.active + draining
        return flow.out

    def _resize(self) -> None:
        lately = list(self.wanted)
        most = self.flow.shape.replicas
        number = self.active
        if len(lately) >= UP_S and min(lately[-UP_S:]) > number:
            number = min(int(np.ceil(min(lately[-UP_S:]))), most)
        elif len(lately) == DOWN_S and max(lately) < number:
            number = max(int(np.ceil(max(lately))), 1)
        if number > self.active:
            # Front ends know the new replicas, and send nothing until they have loaded.
            self.flow.start(np.arange(self.active, number))
        if number != self.active:
            self.active = number
            self.flow.fronts.resize(number)
