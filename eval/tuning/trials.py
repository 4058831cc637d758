"""Whole plans tried to the end: how far their latents are from the exact model's. What was tried is
kept in a file, so a run that was killed goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from eval.tuning.course import CachePlan, Course, exact
from sdxl.conditioning import Conditioning
from sdxl.files import write_json
from sdxl.inflight import Failed, InFlight
from sdxl.params import GenerationParams
from sdxl.pipeline import ENCODE_BATCH, Pipeline


@dataclass
class PromptedImages:
    """Images whose prompts are encoded once, to be denoised in many ways."""

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
        found: dict[int, Tensor] = {}
        for event in loop.drain():
            if isinstance(event, Failed):
                raise event.cause
            found[event.id] = event.latents.float().cpu()
        return torch.stack([found[id_] for id_ in ids])


@dataclass
class PlanTrials:
    """Of one course. An error is the root mean square over all images' latents."""

    images: PromptedImages
    course: Course
    path: Path
    errors: dict[tuple[int, ...], float] = field(init=False)

    def __post_init__(self) -> None:
        self.errors = {}
        if self.path.exists():
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            self.errors = {tuple(each["deep_steps"]): each["error"] for each in stored}

    def run(self, plan: CachePlan) -> float:
        if plan.deep_steps not in self.errors:
            apart = self.images.latents(plan) - self.exact
            self.errors[plan.deep_steps] = float(apart.square().mean()) ** 0.5
            rows = [{"deep_steps": deep, "error": e} for deep, e in self.errors.items()]
            write_json(self.path, rows, indent=None)
        return self.errors[plan.deep_steps]

    @cached_property
    def exact(self) -> Tensor:
        return self.images.latents(exact(self.course))
