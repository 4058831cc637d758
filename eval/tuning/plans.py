"""Plans, which say which steps of a trajectory are deep: their parameters, the search for the best
plans by dynamic programming, and the prediction of a plan's error.

A plan's cost is the sum of its steps' costs. Its error is the sum of its shallow steps' errors,
each given by the step's position and the age of the features that it reads. So of two beginnings
with features of the same age, one that costs more and is no better can be dropped.

Later steps decide how much of a step's error remains at the end, so each step has a gain, fitted to
trials. Errors of several steps add up as independent errors do (their squares) or as aligned errors
do (themselves); the power that fits the trials better is used.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdxl.deepcache import StepPlan, plan, plan_of
from sdxl.params import GenerationParams
from sdxl.presets import Preset

POWERS = (1, 2)
PULL = 0.1
"""weight of the penalty on gains far from their mean; needed for steps that few trials vary"""

StepErrors = Sequence[Sequence[float]]
"""the error of every step by the age of its features, from 1 on"""
Deep = tuple[int, ...]
Terms = Sequence[Sequence[float]]
"""the error that every step adds, by the age of its features from 1 on; at a larger age the step
cannot be shallow"""


@dataclass(frozen=True)
class SamplingSpec:
    """Everything but the deep steps: scheduler, steps, guidance and precision."""

    scheduler: str = "euler"
    steps: int = 20
    guided_until: float = 1.0
    """the share of the steps that is guided, from the first step"""
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
    """A sampling with its deep steps."""

    sampling: SamplingSpec
    deep_steps: tuple[int, ...]

    @property
    def has_even_caches(self) -> bool:
        """True if the deep steps are those of an interval."""
        return self.interval is not None

    @property
    def interval(self) -> int | None:
        every = range(1, self.sampling.steps + 1)
        return next((n for n in every if even(self.sampling, n) == self), None)

    @property
    def is_exact(self) -> bool:
        return len(self.deep_steps) == self.sampling.steps

    def values(self) -> dict[str, Any]:
        """The parameters of a picture with this plan."""
        share = self.sampling.guided_until
        return {
            "scheduler": self.sampling.scheduler,
            "steps": self.sampling.steps,
            "cache_interval": self.interval or 1,
            "deep_steps": None if self.has_even_caches else self.deep_steps,
            "guidance_interval": None if share == 1 else (0.0, share),
        }

    @property
    def preset(self) -> Preset:
        """The plan as the preset of a quality."""
        values = self.values()
        if values["deep_steps"] is not None:
            # For requests with another number of steps, to which `deep_steps` do not apply.
            values["cache_interval"] = max(1, round(self.sampling.steps / len(self.deep_steps)))
        return Preset(**values)

    def apply_to(self, request: GenerationParams) -> GenerationParams:
        return replace(request, **self.values(), guided_steps=None)

    def step_plan(self, guidance: float) -> StepPlan:
        return plan_of(self.apply_to(GenerationParams(guidance=guidance)))

    def as_dict(self) -> dict[str, Any]:
        return {"course": asdict(self.sampling), "deep_steps": list(self.deep_steps)}

    @property
    def slug(self) -> str:
        if self.interval is not None:
            return f"{self.sampling.slug}-interval{self.interval}"
        digest = hashlib.sha256(repr(self.deep_steps).encode()).hexdigest()[:8]
        return f"{self.sampling.slug}-deep{len(self.deep_steps)}-{digest}"

    def __str__(self) -> str:
        if self.is_exact:
            return f"{self.sampling}, exact"
        if self.interval is not None:
            return f"{self.sampling}, interval {self.interval}"
        return f"{self.sampling}, deep {','.join(map(str, self.deep_steps))}"


def even(sampling: SamplingSpec, interval: int) -> CachePlan:
    return CachePlan(sampling, tuple(range(0, sampling.steps, interval)))


def exact(sampling: SamplingSpec) -> CachePlan:
    return even(sampling, 1)


def all_but(sampling: SamplingSpec, step: int) -> CachePlan:
    """Every step is deep except `step`."""
    return CachePlan(sampling, tuple(n for n in range(sampling.steps) if n != step))


def ages(deep_steps: tuple[int, ...], steps: int) -> list[int]:
    """The age in steps of the features that every step reads; 0 for a deep step."""
    by_step: list[int] = []
    for step in plan(steps, 1, deep_steps):
        by_step.append(0 if step.is_deep else by_step[-1] + 1)
    return by_step


class Way(NamedTuple):
    """The first steps of a plan, or all of them."""

    cost: int
    """an integer, so that sums do not depend on the order of the steps"""
    error: float
    deep_steps: tuple[int, ...]


def search(terms: Terms, deep: Sequence[int], shallow: Sequence[int]) -> list[Way]:
    """All unbeaten plans, the cheapest first. `deep` and `shallow` are the costs of each step."""
    ways = {0: [Way(deep[0], 0.0, (0,))]}
    for step in range(1, len(deep)):
        ways = _lengthen(ways, step, terms[step], deep[step], shallow[step])
    return unbeaten(way for each in ways.values() for way in each)


def _lengthen(
    ways: dict[int, list[Way]], step: int, terms: Sequence[float], deep: int, shallow: int
) -> dict[int, list[Way]]:
    """Add one step, deep or shallow, to each partial plan. Return them by the age of their cached
    features after this step."""
    before = (way for each in ways.values() for way in each)
    longer = {0: unbeaten(Way(w.cost + deep, w.error, (*w.deep_steps, step)) for w in before)}
    for age, term in enumerate(terms, 1):
        if reached := ways.get(age - 1):
            longer[age] = [Way(w.cost + shallow, w.error + term, w.deep_steps) for w in reached]
    return longer


def unbeaten(ways: Iterable[Way]) -> list[Way]:
    best: list[Way] = []
    for way in sorted(ways):
        if not best or way.error < best[-1].error:
            best.append(way)
    return best


def find_best_within(ways: Sequence[Way], cost: float) -> Way | None:
    """The best of `unbeaten` plans within the cost."""
    return max((way for way in ways if way.cost <= cost), key=lambda way: way.cost, default=None)


@dataclass(frozen=True)
class Prediction:
    power: int
    gains: tuple[float, ...]
    """the factor of every step's error, raised to the power"""
    misfit: float
    """the mean of |log2(predicted / measured error)|: 1 is a factor of two"""

    def terms(self, errors: StepErrors) -> list[list[float]]:
        """The error that every step adds, for `search`."""
        return [
            [gain * error**self.power for error in row]
            for gain, row in zip(self.gains, errors, strict=True)
        ]


def powered(errors: StepErrors, deep_steps: Deep, power: int) -> NDArray[np.float64]:
    """Each step's error in this plan, raised to the power; 0 for a deep step."""
    each = zip(ages(deep_steps, len(errors)), errors, strict=True)
    return np.array([row[age - 1] ** power if age else 0.0 for age, row in each])


def fit(errors: StepErrors, measured: Mapping[Deep, float]) -> Prediction:
    """`measured`: the errors of tried plans. Without trials all gains are 1."""
    tried = {
        deep: error for deep, error in measured.items() if len(deep) < len(errors) and error > 0
    }
    if not tried:
        return Prediction(2, (1.0,) * len(errors), math.nan)
    return min((_fitted(errors, tried, power) for power in POWERS), key=lambda each: each.misfit)


def _fitted(errors: StepErrors, measured: Mapping[Deep, float], power: int) -> Prediction:
    from scipy.optimize import nnls

    # Divide by the measured error, so that plans with small errors weigh as much as others.
    rows = np.stack([powered(errors, deep, power) / e**power for deep, e in measured.items()])
    mean = max(len(rows) / rows.sum(), 1e-12)
    scaled = np.vstack([rows * mean, PULL * np.eye(len(errors))])
    wanted = np.concatenate([np.ones(len(rows)), PULL * np.ones(len(errors))])
    gains = mean * nnls(scaled, wanted)[0]
    predicted = (rows @ gains) ** (1 / power)
    misfit = np.abs(np.log2(np.maximum(predicted, 1e-9))).mean()
    return Prediction(power, tuple(map(float, gains)), float(misfit))
