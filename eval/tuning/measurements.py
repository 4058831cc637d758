"""Measurements of a tuning: the cost of each kind of step, the error of a single shallow step, and
the error of whole plans. Results are stored in files, so an interrupted run resumes.

A probe in the place of the deep engine measures single steps while every step is deep. After each
call the probe also runs the shallow engine on the same inputs with features of earlier steps, and
records the difference of the noise. So any backend can be measured in the usual loop.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.tuning.plans import CachePlan, SamplingSpec, exact
from sdxl import schedulers
from sdxl.conditioning import Conditioning
from sdxl.deepcache import Step, StepPlan
from sdxl.engine import Engine, Engines
from sdxl.files import write_json
from sdxl.flight import Network
from sdxl.inflight import Failed, InFlight
from sdxl.params import GenerationParams
from sdxl.pipeline import ENCODE_BATCH, Pipeline
from sdxl.policy import Group
from sdxl.specs import ModelSpec

NOISE = "noise"
ROUNDS = 5
MEASURED = GenerationParams(
    steps=12, deep_steps=(0, 2, 4, 6, 8, 10), guided_steps=(0, 1, 2, 3, 4, 5)
)
"""three steps of each kind"""
KINDS = tuple(Step(is_deep, is_guided) for is_deep in (True, False) for is_guided in (True, False))
UNITS_A_S = 10**9
"""`search` takes integer costs: nanoseconds"""


@dataclass
class PromptedImages:
    """Images whose prompts are encoded once and denoised by many plans."""

    pipeline: Pipeline
    requests: Sequence[GenerationParams]

    @cached_property
    def resolved(self) -> list[GenerationParams]:
        return [self.pipeline.resolve(request) for request in self.requests]

    @cached_property
    def conditionings(self) -> list[Conditioning]:
        parts = range(0, len(self.resolved), ENCODE_BATCH)
        encoded = (self.pipeline.encode(self.resolved[i : i + ENCODE_BATCH]) for i in parts)
        return [each for part in encoded for each in part]

    def latents(self, plan: CachePlan) -> Tensor:
        """[images, channels, h, w], on the CPU, in the requests' order."""
        loop = InFlight(self.pipeline.engines, self.pipeline.clock, self.pipeline.limits())
        ids = [
            loop.submit(self.pipeline.request(plan.apply_to(params), conditioning))
            for params, conditioning in zip(self.resolved, self.conditionings, strict=True)
        ]
        latents: dict[int, Tensor] = {}
        for event in loop.drain():
            if isinstance(event, Failed):
                raise event.cause
            latents[event.id] = event.latents.float().cpu()
        return torch.stack([latents[id_] for id_ in ids])


@dataclass
class PlanTrials:
    """The errors of one sampling's tried plans: the root mean square over all images' latents."""

    images: PromptedImages
    sampling: SamplingSpec
    path: Path

    @cached_property
    def errors(self) -> dict[tuple[int, ...], float]:
        stored = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else []
        return {tuple(each["deep_steps"]): each["error"] for each in stored}

    def run(self, plan: CachePlan) -> float:
        if plan.deep_steps not in self.errors:
            difference = self.images.latents(plan) - self.exact
            self.errors[plan.deep_steps] = float(difference.square().mean()) ** 0.5
            rows = [{"deep_steps": deep, "error": e} for deep, e in self.errors.items()]
            write_json(self.path, rows, indent=None)
        return self.errors[plan.deep_steps]

    @cached_property
    def exact(self) -> Tensor:
        return self.images.latents(exact(self.sampling))


@dataclass
class ErrorProbe:
    """Runs the deep engine, and measures the error of the shallow engine with older features."""

    deep: Engine
    shallow: Engine
    guidance: Sequence[float]
    """of each image in the call"""
    kept: deque[dict[str, Tensor]]
    """the features of the last steps"""
    errors: list[list[float]] = field(default_factory=list)
    """the mean squared difference of the noise of every step, by the age of the features"""

    @property
    def spec(self) -> ModelSpec:
        return self.deep.spec

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        self.deep(inputs, outputs)
        expected, rows = self._guided(outputs[NOISE]), len(outputs[NOISE])
        differences = []
        for features in reversed(self.kept):
            noise = torch.empty_like(outputs[NOISE])
            shallow_inputs = {
                t.name: inputs[t.name] if t.name in inputs else features[t.name][:rows].contiguous()
                for t in self.shallow.spec.inputs
            }
            self.shallow(shallow_inputs, {NOISE: noise})
            differences.append(float((self._guided(noise) - expected).square().mean()))
        self.errors.append(differences)
        self.kept.append({name: t.clone() for name, t in outputs.items() if name != NOISE})

    def _guided(self, noise: Tensor) -> Tensor:
        """The guided noise, as the loop computes it. Positive rows come first."""
        count = len(self.guidance)
        positive = noise[:count].float()
        if len(noise) < 2 * count:
            return positive
        factors = torch.tensor(self.guidance, device=noise.device).view(-1, 1, 1, 1)
        return torch.lerp(noise[count : 2 * count].float(), positive, factors)


def images_at_once(engines: Engines, most: int) -> int:
    """The largest number of images that fills a bucket both with and without guidance."""
    sizes = set(engines.buckets)
    return max((n for n in range(1, most + 1) if n in sizes and 2 * n in sizes), default=1)


def measure_errors(
    pipeline: Pipeline,
    sampling: SamplingSpec,
    requests: Sequence[GenerationParams],
    path: Path,
    oldest: int,
) -> list[list[float]]:
    """The root mean square error of the latents from every step, by the age of its features. Groups
    stored in `path` are not measured again."""
    stored: list[Any] = json.loads(path.read_text("utf-8")) if path.exists() else []
    size = images_at_once(pipeline.engines, len(requests))
    groups = [requests[i : i + size] for i in range(0, len(requests) - size + 1, size)]
    for group in groups[len(stored) :]:
        stored.append(_probed(pipeline, sampling, group, oldest))
        write_json(path, stored, end="", indent=None)
    weights = _weights(sampling, pipeline)
    by_step = zip(weights, zip(*stored, strict=True), strict=True)
    return [(weight * np.sqrt(np.mean(rows, axis=0))).tolist() for weight, rows in by_step]


def _probed(
    pipeline: Pipeline, sampling: SamplingSpec, group: Sequence[GenerationParams], oldest: int
) -> list[list[float]]:
    engines = pipeline.engines
    guidance, kept = [request.guidance for request in group], deque[Any](maxlen=oldest)
    probe = ErrorProbe(engines["unet_deep"], engines["unet_shallow"], guidance, kept)
    # Switch off recordings and calls ahead: a replayed recording would skip the probe.
    watched = replace(
        engines,
        by_name={**engines.by_name, "unet_deep": probe},
        run_recorded=Engines.run_recorded,
        calls_ahead=0,
    )
    PromptedImages(replace(pipeline, engines=watched), group).latents(exact(sampling))
    return probe.errors


def _weights(sampling: SamplingSpec, pipeline: Pipeline) -> list[float]:
    """The factor from each step's noise to the latents, through this step and through the next one,
    which may read this step's estimate."""
    table = schedulers.table(sampling.scheduler, sampling.steps, pipeline.checkpoint.scheduler)
    b, c, f = (table.rows[:, schedulers.COLUMNS.index(name)] for name in "bcf")
    later = np.append(c[1:], 0.0)
    return [float(each) for each in np.abs(b + later * f)]


@dataclass(frozen=True)
class StepCosts:
    """Seconds of one image's step, by kind."""

    seconds: Mapping[Step, float]

    def of(self, plan: StepPlan) -> float:
        return sum(self.seconds[step] for step in plan)

    def units(self, plan: StepPlan, *, is_deep: bool) -> list[int]:
        """The cost of every step as a deep one, or as a shallow one."""
        kinds = (Step(is_deep, step.is_guided) for step in plan)
        return [round(self.seconds[kind] * UNITS_A_S) for kind in kinds]

    def as_dict(self) -> list[dict[str, Any]]:
        return [{**step._asdict(), "seconds": s} for step, s in self.seconds.items()]

    @classmethod
    def from_dict(cls, stored: list[dict[str, Any]]) -> StepCosts:
        return cls({Step(e["is_deep"], e["is_guided"]): e["seconds"] for e in stored})


def measure_costs(pipeline: Pipeline, request: GenerationParams, images: int) -> StepCosts:
    """Seconds of each kind of step, with `images` copies of the request in flight."""
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
    image = pipeline.request(params, conditioning)
    limits = replace(pipeline.limits(), rows=pipeline.limits().buckets[-1])
    loop = InFlight(pipeline.engines, clock_of(pipeline), limits)
    for round_ in range(ROUNDS + 1):
        for _ in range(images):
            loop.submit(image)
        flight = loop.flights[0]
        loop.drain()
        if round_ == 0:
            # The first round warms up.
            loop.costs.ticks.clear()

    def of(kind: Step) -> float:
        network: Network = "unet_deep" if kind.is_deep else "unet_shallow"
        group = Group(flight.call(network), (), limits.bucket(images * kind.rows))
        return loop.costs.tick_s(group) / images

    return StepCosts({kind: of(kind) for kind in KINDS})


def clock_of(pipeline: Pipeline) -> Callable[[], float]:
    """On a CPU the process's CPU time, which other work on the machine does not change."""
    if pipeline.engines.device.type != "cpu":
        return time.perf_counter
    return lambda: time.process_time() / torch.get_num_threads()
