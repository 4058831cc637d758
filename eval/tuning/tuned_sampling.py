"""The search for the best plans of one sampling: measure single steps, propose plans, try the
plans, and repeat with a better prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from eval.tuning.measurements import (
    UNITS_A_S,
    PlanTrials,
    PromptedImages,
    StepCosts,
    measure_errors,
)
from eval.tuning.plans import (
    CachePlan,
    SamplingSpec,
    StepErrors,
    all_but,
    even,
    find_best_within,
    fit,
    search,
)
from sdxl.files import prepare_folder
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline

OLDEST = 6
"""the largest age of features, in steps"""
INTERVALS = (2, 3, 4)
ROUNDS = 2

IsLate = Callable[[], bool]
Report = Callable[[str], None]


@dataclass
class TunedSampling:
    """`budgets_s`: an image's maximum costs; for each the best tried plan is found."""

    sampling: SamplingSpec
    pipeline: Pipeline
    requests: Sequence[GenerationParams]
    costs: StepCosts
    budgets_s: Sequence[float]
    folder: Path

    @cached_property
    def trials(self) -> PlanTrials:
        images = PromptedImages(self.pipeline, self.requests)
        return PlanTrials(images, self.sampling, self.folder / "trials.json")

    def cost(self, plan: CachePlan) -> float:
        return self.costs.of(plan.step_plan(self.requests[0].guidance))

    def run(self, is_late: IsLate, report: Report) -> None:
        """Search until all trials are done or `is_late`. Stored results are reused."""
        prepare_folder(self.folder)
        report(f"{self.sampling}: single steps")
        path = self.folder / "local-errors.json"
        errors = measure_errors(self.pipeline, self.sampling, self.requests, path, OLDEST)
        training = [even(self.sampling, interval) for interval in INTERVALS]
        training += [all_but(self.sampling, step) for step in range(1, self.sampling.steps)]
        self._try(training, is_late, report)
        for _ in range(ROUNDS):
            self._try(self.proposed(errors), is_late, report)

    def _try(self, plans: Iterable[CachePlan], is_late: IsLate, report: Report) -> None:
        for plan in plans:
            if is_late():
                return
            report(str(plan))
            self.trials.run(plan)

    def proposed(self, errors: StepErrors) -> list[CachePlan]:
        """For each budget, the plan with the best prediction."""
        kinds = even(self.sampling, 1).step_plan(self.requests[0].guidance)
        deep, shallow = (self.costs.units(kinds, is_deep=is_deep) for is_deep in (True, False))
        ways = search(fit(errors, self.trials.errors).terms(errors), deep, shallow)
        best = (find_best_within(ways, budget * UNITS_A_S) for budget in self.budgets_s)
        return [CachePlan(self.sampling, way.deep_steps) for way in best if way is not None]

    def best(self) -> list[CachePlan]:
        """For each budget, the tried plan with the smallest error, without repeats."""
        errors = {CachePlan(self.sampling, deep): e for deep, e in self.trials.errors.items()}
        best = []
        for budget in self.budgets_s:
            within = [plan for plan in errors if self.cost(plan) <= budget]
            best += [min(within, key=errors.__getitem__)] if within else []
        return list(dict.fromkeys(best))
