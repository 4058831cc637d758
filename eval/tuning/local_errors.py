"""What one shallow step changes: on the exact model's way, at every step, by its features' age.

A probe stands in the place of the deep engine. The loop runs as ever, with every step deep; after
each call the probe runs Shallow on the same inputs with features kept from steps before, and notes
how far its noise is from Deep's. So there is no second loop, and any backend can be measured.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.tuning.course import Course, exact
from eval.tuning.trials import PromptedImages
from sdxl import schedulers
from sdxl.engine import Engine, Engines
from sdxl.files import write_json
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline
from sdxl.specs import ModelSpec

NOISE = "noise"


@dataclass
class ErrorProbe:
    """An engine: Deep, and what Shallow would have made of older features."""

    deep: Engine
    shallow: Engine
    guidance: Sequence[float]
    """of every image in the call"""
    ages: int
    kept: deque[dict[str, Tensor]] = field(init=False)
    found: list[list[float]] = field(default_factory=list)
    """of every step, by age: the mean over images of the squared difference of the noise"""

    def __post_init__(self) -> None:
        self.kept = deque(maxlen=self.ages)

    @property
    def spec(self) -> ModelSpec:
        return self.deep.spec

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        self.deep(inputs, outputs)
        expected, rows = self._guided(outputs[NOISE]), len(outputs[NOISE])
        differences = []
        for features in reversed(self.kept):
            noise = torch.empty_like(outputs[NOISE])
            given = {
                t.name: inputs[t.name] if t.name in inputs else features[t.name][:rows].contiguous()
                for t in self.shallow.spec.inputs
            }
            self.shallow(given, {NOISE: noise})
            differences.append(float((self._guided(noise) - expected).square().mean()))
        self.found.append(differences)
        self.kept.append({name: t.clone() for name, t in outputs.items() if name != NOISE})

    def _guided(self, noise: Tensor) -> Tensor:
        """As the loop combines it: positive rows first."""
        count = len(self.guidance)
        positive = noise[:count].float()
        if len(noise) < 2 * count:
            return positive
        factors = torch.tensor(self.guidance, device=noise.device).view(-1, 1, 1, 1)
        return torch.lerp(noise[count : 2 * count].float(), positive, factors)


def images_at_once(engines: Engines, most: int) -> int:
    """As many as fill a call's bucket both with guidance and without."""
    sizes = set(engines.buckets)
    return max((n for n in range(1, most + 1) if n in sizes and 2 * n in sizes), default=1)


def measure_errors(
    pipeline: Pipeline,
    course: Course,
    requests: Sequence[GenerationParams],
    path: Path,
    oldest: int,
) -> list[list[float]]:
    """Of every step, by age: the root mean square of what it changes in the latents. Groups that
    `path` holds already are not measured again."""
    stored: list[Any] = json.loads(path.read_text("utf-8")) if path.exists() else []
    size = images_at_once(pipeline.engines, len(requests))
    groups = [requests[i : i + size] for i in range(0, len(requests) - size + 1, size)]
    for group in groups[len(stored) :]:
        stored.append(_probed(pipeline, course, group, oldest))
        write_json(path, stored, end="", indent=None)
    weights = _weights(course, pipeline)
    squares = [
        [np.mean(each) for each in zip(*rows, strict=True)] for rows in zip(*stored, strict=True)
    ]
    return [
        [weight * float(square) ** 0.5 for square in row]
        for weight, row in zip(weights, squares, strict=True)
    ]


def _probed(
    pipeline: Pipeline, course: Course, group: Sequence[GenerationParams], oldest: int
) -> list[list[float]]:
    engines = pipeline.engines
    probe = ErrorProbe(
        engines["unet_deep"], engines["unet_shallow"], [r.guidance for r in group], oldest
    )
    # Unrecorded and one call at a time: a replayed recording would pass the probe by.
    watched = replace(
        engines,
        by_name={**engines.by_name, "unet_deep": probe},
        run_recorded=lambda _, work: work(),
        calls_ahead=0,
    )
    PromptedImages(replace(pipeline, engines=watched), group).latents(exact(course))
    return probe.found


def _weights(course: Course, pipeline: Pipeline) -> list[float]:
    """How much of a difference of the noise reaches the latents: by this step, and by the next one,
    which may read this one's estimate."""
    table = schedulers.table(course.scheduler, course.steps, pipeline.checkpoint.scheduler)
    b, c, f = (table.rows[:, schedulers.COLUMNS.index(name)] for name in "bcf")
    later = np.append(c[1:], 0.0)
    return [float(each) for each in np.abs(b + later * f)]
