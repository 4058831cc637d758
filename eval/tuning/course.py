"""What a plan is sought for, and plans: which of a course's steps run the whole UNet. It runs
nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from typing import Any

from sdxl.deepcache import StepPlan, plan, plan_of
from sdxl.params import GenerationParams
from sdxl.presets import Preset


@dataclass(frozen=True)
class Course:
    """All that is settled before deep steps are chosen."""

    scheduler: str = "euler"
    steps: int = 20
    guided_until: float = 1.0
    """the share of the steps, from the first one, that is guided"""
    precision: str = "fp32"

    @property
    def slug(self) -> str:
        share = "" if self.guided_until == 1 else f"-guided{self.guided_until:g}"
        return f"{self.precision}-{self.scheduler}-{self.steps}{share}"

    def __str__(self) -> str:
        share = "" if self.guided_until == 1 else f", guided to {self.guided_until:g}"
        return f"{self.precision} {self.scheduler} {self.steps}{share}"


@dataclass(frozen=True)
class CachePlan:
    """A course with its deep steps. Two with the same ones are the same, whoever proposed them."""

    course: Course
    deep_steps: tuple[int, ...]

    @property
    def has_even_caches(self) -> bool:
        """It is what `cache_interval` says: exact, or a deep step in every so many."""
        return self.interval is not None

    @property
    def interval(self) -> int | None:
        every = range(1, self.course.steps + 1)
        return next((n for n in every if even(self.course, n) == self), None)

    @property
    def is_exact(self) -> bool:
        return len(self.deep_steps) == self.course.steps

    def values(self) -> dict[str, Any]:
        """The parameters of a picture that follow from it."""
        share = self.course.guided_until
        return {
            "scheduler": self.course.scheduler,
            "steps": self.course.steps,
            "cache_interval": self.interval or 1,
            "deep_steps": None if self.has_even_caches else self.deep_steps,
            "guidance_interval": None if share == 1 else (0.0, share),
        }

    @property
    def preset(self) -> Preset:
        """As a quality's name would stand for it."""
        values = self.values()
        if values["deep_steps"] is not None:
            # For a request that names other steps, whose deep ones it cannot be.
            values["cache_interval"] = max(1, round(self.course.steps / len(self.deep_steps)))
        return Preset(**values)

    def apply_to(self, request: GenerationParams) -> GenerationParams:
        return replace(request, **self.values(), guided_steps=None)

    def step_plan(self, guidance: float) -> StepPlan:
        return plan_of(self.apply_to(GenerationParams(guidance=guidance)))

    def as_dict(self) -> dict[str, Any]:
        return {"course": asdict(self.course), "deep_steps": list(self.deep_steps)}

    @property
    def slug(self) -> str:
        if self.interval is not None:
            return f"{self.course.slug}-interval{self.interval}"
        digest = hashlib.sha256(repr(self.deep_steps).encode()).hexdigest()[:8]
        return f"{self.course.slug}-deep{len(self.deep_steps)}-{digest}"

    def __str__(self) -> str:
        if self.is_exact:
            return f"{self.course}, exact"
        if self.interval is not None:
            return f"{self.course}, interval {self.interval}"
        return f"{self.course}, deep {','.join(map(str, self.deep_steps))}"


def even(course: Course, interval: int) -> CachePlan:
    return CachePlan(course, tuple(range(0, course.steps, interval)))


def exact(course: Course) -> CachePlan:
    return even(course, 1)


def all_but(course: Course, step: int) -> CachePlan:
    """Every step deep but this one."""
    return CachePlan(course, tuple(n for n in range(course.steps) if n != step))


def ages(deep_steps: tuple[int, ...], steps: int) -> list[int]:
    """Of every step, how many steps ago the features that it reads were made; 0: it makes them."""
    found: list[int] = []
    for step in plan(steps, 1, deep_steps):
        found.append(0 if step.is_deep else found[-1] + 1)
    return found
