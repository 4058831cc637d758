"""What each step of an image runs: DeepCache's deep and shallow steps, as a plan.

Ma, Fang, Wang, "DeepCache: Accelerating Diffusion Models for Free", arXiv:2312.00858.
It imports no networks and no tensors.
"""

from __future__ import annotations

from typing import NamedTuple

from sdxl.params import GenerationParams


class Step(NamedTuple):
    """What one step of one image runs. It is never false: ask for its fields."""

    is_deep: bool
    """the whole UNet; else Shallow, on the features kept from the last deep step"""
    is_guided: bool = True
    """a row for the negative prompt beside the positive one"""

    @property
    def rows(self) -> int:
        return 2 if self.is_guided else 1


StepPlan = tuple[Step, ...]
"""One record a step. The first is always deep."""


def plan(
    steps: int,
    interval: int,
    deep_steps: tuple[int, ...] | None = None,
    *,
    is_guided: bool = True,
) -> StepPlan:
    """One deep step in `interval`, or exactly `deep_steps`; with guidance in every step or none."""
    deep = set(range(0, steps, interval) if deep_steps is None else deep_steps)
    return tuple(Step(step in deep, is_guided) for step in range(steps))


def plan_of(params: GenerationParams) -> StepPlan:
    steps, interval, deep_steps = params.taken_steps, params.cache_interval, params.deep_steps
    return plan(steps, interval, deep_steps, is_guided=params.is_guided)


def deep_count(steps: StepPlan) -> int:
    return sum(step.is_deep for step in steps)


def most_rows(steps: StepPlan) -> int:
    """What the image needs room for."""
    return max(step.rows for step in steps)
