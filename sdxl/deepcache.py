"""Step plans: which steps of a picture are deep or shallow (DeepCache), and guided or not.

Ma, Fang, Wang, "DeepCache: Accelerating Diffusion Models for Free", arXiv:2312.00858. Guidance in a
part of the steps: Kynkäänniemi et al., "Applying Guidance in a Limited Interval Improves Sample and
Distribution Quality in Diffusion Models", arXiv:2404.07724. It imports no networks and no tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import NamedTuple

from sdxl.controls import Window
from sdxl.params import GenerationParams


class Step(NamedTuple):
    """One step of one picture. A step is always truthy, as a tuple: test its fields."""

    is_deep: bool
    """True: the whole UNet; False: shallow, with features cached by the last deep step."""
    is_guided: bool = True
    """True: a row for the negative prompt beside the positive one."""
    is_refined: bool = False
    """True: the refiner runs it. The refiner needs its own features, so its first step is deep."""

    @property
    def rows(self) -> int:
        return 2 if self.is_guided else 1


class StepPlan(tuple[Step, ...]):
    """A picture's steps. The first is deep. A shallow step is guided only after a guided step: the
    negative row needs features, and only a deep step makes them."""

    def __new__(cls, steps: Iterable[Step]) -> StepPlan:
        plan = super().__new__(cls, steps)
        if not plan or not plan[0].is_deep:
            raise ValueError("the first step of a plan is deep")
        for number, (before, step) in enumerate(itertools.pairwise(plan), 1):
            if step.is_guided and not (step.is_deep or before.is_guided):
                raise ValueError(f"step {number} is shallow: guidance begins at a deep step")
            if step.is_refined != before.is_refined and not step.is_deep:
                raise ValueError(f"step {number} is shallow: the refiner begins with a deep step")
        return plan

    @cached_property
    def room(self) -> tuple[int, ...]:
        """For each step, the largest number of rows from that step to the end; 0 after the last."""
        most = itertools.accumulate((step.rows for step in reversed(self)), max, initial=0)
        return tuple(most)[::-1]

    @cached_property
    def steady(self) -> tuple[int, ...]:
        """For each step, the number of steps until fewer rows are needed."""
        ends = {rows: number for number, rows in enumerate(self.room, 1)}
        return tuple(ends[rows] - number for number, rows in enumerate(self.room))

    @cached_property
    def rows_before(self) -> tuple[int, ...]:
        """For each step, the sum of the rows of all steps before; the last entry is the total."""
        return tuple(itertools.accumulate((step.rows for step in self), initial=0))

    @cached_property
    def deep_rows_before(self) -> tuple[int, ...]:
        """`rows_before` for deep steps only."""
        deep = (step.rows if step.is_deep else 0 for step in self)
        return tuple(itertools.accumulate(deep, initial=0))

    @cached_property
    def to_deep(self) -> tuple[float, ...]:
        """For each step, the number of steps until the next deep one; infinite after the last."""
        counted = itertools.accumulate(
            reversed(self), lambda left, step: 0 if step.is_deep else left + 1, initial=math.inf
        )
        return tuple(counted)[:0:-1]

    @cached_property
    def deep_is_refined(self) -> tuple[bool, ...]:
        """For each step, whether the next deep one is the refiner's."""
        flags = itertools.accumulate(
            reversed(self),
            lambda later, step: step.is_refined if step.is_deep else later,
            initial=False,
        )
        return tuple(flags)[:0:-1]

    @cached_property
    def refined_from(self) -> int | None:
        """The refiner's first step."""
        return next((number for number, step in enumerate(self) if step.is_refined), None)

    def rows(self, *, is_deep: bool, is_refined: bool | None = None) -> int:
        """Return the rows of all deep or all shallow steps; with `is_refined`, of one model."""
        return sum(
            step.rows
            for step in self
            if step.is_deep == is_deep and is_refined in (None, step.is_refined)
        )

    def rows_in(self, window: Window) -> int:
        """Return the rows of the deep steps in which a ControlNet guides the picture."""
        return sum(
            window.rows(step.rows)
            for number, step in enumerate(self)
            if step.is_deep and not step.is_refined and window.covers(number, len(self))
        )


def plan(
    steps: int,
    interval: int,
    deep_steps: Collection[int] | None = None,
    guided_steps: Collection[int] | None = None,
    refined_from: int | None = None,
) -> StepPlan:
    """Return the step plan. Every `interval`th step of each model is deep, or only `deep_steps` and
    the refiner's first step. All steps are guided, or only `guided_steps` from a deep step on."""
    switch = steps if refined_from is None else refined_from
    deep: Collection[int] = {*range(0, switch, interval), *range(switch, steps, interval)}
    if deep_steps is not None:
        deep = {*deep_steps, switch}
    guided = range(steps) if guided_steps is None else guided_steps
    plan: list[Step] = []
    for number in range(steps):
        is_deep = number in deep
        has_negative_row = is_deep or plan[-1].is_guided
        is_guided = number in guided and has_negative_row
        plan.append(Step(is_deep, is_guided, number >= switch))
    return StepPlan(plan)


def plan_of(
    params: GenerationParams, *, embeds_guidance: bool = False, refined_from: int | None = None
) -> StepPlan:
    """Return a request's step plan. A model that embeds guidance needs no negative row. The refiner
    runs the steps from `refined_from` on."""
    steps, interval = params.taken_steps, params.interval
    guided = () if embeds_guidance else _guided_steps(params)
    return plan(steps, interval, params.deep_steps, guided, refined_from)


def spoils(params: GenerationParams) -> bool:
    """True if the cache interval harms pictures more than it saves: at 4 steps it spoils one in
    nine pictures of the embedded model and saves a fifth of the time (docs/models.md)."""
    return params.has_few_steps and params.deep_steps is None and params.interval > 1


def _guided_steps(params: GenerationParams) -> Collection[int] | None:
    """Return the numbers of the steps to guide; None for all."""
    if not params.is_guided:
        return ()
    if params.guided_steps is not None or params.guidance_interval is None:
        return params.guided_steps
    begin, end = params.guidance_interval
    # A step's end decides, as in diffusers' guiders. The range is a part of the whole schedule, so
    # an edit, which skips the first steps, is guided at the same noise levels.
    ends = ((params.first_step + step + 1) / params.steps for step in range(params.taken_steps))
    return [step for step, at in enumerate(ends) if begin < at <= end]


def deep_count(steps: StepPlan) -> int:
    return sum(step.is_deep for step in steps)
