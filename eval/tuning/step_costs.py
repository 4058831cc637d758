"""What each kind of step costs an image: seconds of engine calls, as the loop itself measures them
(sdxl/cost.py), with as many images in flight as there are in a measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from sdxl.deepcache import Step, StepPlan
from sdxl.flight import Network
from sdxl.inflight import InFlight
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline
from sdxl.policy import Group

ROUNDS = 5
MEASURED = GenerationParams(
    steps=12, deep_steps=(0, 2, 4, 6, 8, 10), guided_steps=(0, 1, 2, 3, 4, 5)
)
"""Three steps of each kind."""
KINDS = tuple(Step(is_deep, is_guided) for is_deep in (True, False) for is_guided in (True, False))
UNITS_A_S = 10**9
"""costs in whole nanoseconds: see search.py"""


@dataclass(frozen=True)
class StepCosts:
    """Seconds of one image's step, by its kind."""

    seconds: Mapping[Step, float]

    def of(self, plan: StepPlan) -> float:
        return sum(self.seconds[step] for step in plan)

    def units(self, plan: StepPlan, *, is_deep: bool) -> list[int]:
        """Of every step, if it were deep, or shallow."""
        kinds = (Step(is_deep, step.is_guided) for step in plan)
        return [round(self.seconds[kind] * UNITS_A_S) for kind in kinds]

    def as_dict(self) -> list[dict[str, Any]]:
        return [{**step._asdict(), "seconds": s} for step, s in self.seconds.items()]

    @classmethod
    def from_dict(cls, stored: list[dict[str, Any]]) -> StepCosts:
        return cls({Step(e["is_deep"], e["is_guided"]): e["seconds"] for e in stored})


def measure_costs(pipeline: Pipeline, request: GenerationParams, images: int) -> StepCosts:
    """`request` says the size and the prompt; `images` of it are in flight."""
    request = replace(
        request,
        steps=MEASURED.steps,
        deep_steps=MEASURED.deep_steps,
        guided_steps=MEASURED.guided_steps,
        guidance_interval=None,
        guidance=max(request.guidance, MEASURED.guidance),
    )
    params = pipeline.resolve(request)
    (conditioning,) = pipeline.encode([params])
    asked = pipeline.request(params, conditioning)
    limits = replace(pipeline.limits(), rows=pipeline.limits().buckets[-1])
    loop = InFlight(pipeline.engines, clock_of(pipeline), limits)
    for round_ in range(ROUNDS + 1):
        for _ in range(images):
            loop.submit(asked)
        flight = loop.flights[0]
        loop.drain()
        if round_ == 0:
            # The first calls prepare what later ones find.
            loop.costs.ticks.clear()

    def of(kind: Step) -> float:
        network: Network = "unet_deep" if kind.is_deep else "unet_shallow"
        group = Group(flight.call(network), (), limits.bucket(images * kind.rows))
        return loop.costs.tick_s(group) / images

    return StepCosts({kind: of(kind) for kind in KINDS})


def clock_of(pipeline: Pipeline) -> Callable[[], float]:
    """On a CPU this process's own time, so that other work on the machine moves no cost."""
    if pipeline.engines.device.type != "cpu":
        return time.perf_counter
    return lambda: time.process_time() / torch.get_num_threads()
