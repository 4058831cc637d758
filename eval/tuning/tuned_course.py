"""The search for one course: what single steps do, which plans follow, what they do in the end; and
the same again with what that taught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from eval.tuning.course import CachePlan, Course, all_but, even
from eval.tuning.local_errors import measure_errors
from eval.tuning.prediction import Prediction, fit
from eval.tuning.search import best_within, search
from eval.tuning.step_costs import UNITS_A_S, StepCosts
from eval.tuning.trials import PlanTrials, PromptedImages
from sdxl.files import prepare_folder
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline

OLDEST = 6
"""steps that features may be old"""
INTERVALS = (2, 3, 4)
ROUNDS = 2

IsLate = Callable[[], bool]
Tell = Callable[[str], None]


@dataclass
class TunedCourse:
    """`budgets_s` are what an image may cost; for each, the best plan that was tried."""

    course: Course
    pipeline: Pipeline
    requests: Sequence[GenerationParams]
    costs: StepCosts
    budgets_s: Sequence[float]
    folder: Path
    errors: list[list[float]] = field(default_factory=list)
    prediction: Prediction | None = None

    @cached_property
    def trials(self) -> PlanTrials:
        images = PromptedImages(self.pipeline, self.requests)
        return PlanTrials(images, self.course, self.folder / "trials.json")

    def cost(self, plan: CachePlan) -> float:
        return self.costs.of(plan.step_plan(self.requests[0].guidance))

    def run(self, is_late: IsLate, tell: Tell) -> None:
        """Until it is done or late; what is there already is not done again."""
        prepare_folder(self.folder)
        tell(f"{self.course}: single steps")
        path = self.folder / "local-errors.json"
        self.errors = measure_errors(self.pipeline, self.course, self.requests, path, OLDEST)
        taught = [even(self.course, interval) for interval in INTERVALS]
        taught += [all_but(self.course, step) for step in range(1, self.course.steps)]
        self._try(taught, is_late, tell)
        for _ in range(ROUNDS):
            self.prediction = fit(self.errors, self.trials.errors)
            self._try(self.proposed(), is_late, tell)
        self.prediction = fit(self.errors, self.trials.errors)

    def _try(self, plans: Iterable[CachePlan], is_late: IsLate, tell: Tell) -> None:
        for plan in plans:
            if is_late():
                return
            tell(str(plan))
            self.trials.run(plan)

    def proposed(self) -> list[CachePlan]:
        """For each budget the best plan by prediction."""
        assert self.prediction is not None
        kinds = even(self.course, 1).step_plan(self.requests[0].guidance)
        deep, shallow = (self.costs.units(kinds, is_deep=is_deep) for is_deep in (True, False))
        ways = search(self.prediction.terms(self.errors), deep, shallow)
        best = (best_within(ways, budget * UNITS_A_S) for budget in self.budgets_s)
        return [CachePlan(self.course, way.deep_steps) for way in best if way is not None]

    def best(self) -> list[CachePlan]:
        """For each budget the plan that was found nearest to the exact model, each once."""
        tried = [
            (error, CachePlan(self.course, deep)) for deep, error in self.trials.errors.items()
        ]
        found: list[CachePlan] = []
        for budget in self.budgets_s:
            within = [(error, plan) for error, plan in tried if self.cost(plan) <= budget]
            if within and (plan := min(within, key=lambda each: each[0])[1]) not in found:
                found.append(plan)
        return found

    def as_dict(self) -> dict[str, Any]:
        tried = []
        for deep, error in self.trials.errors.items():
            plan = CachePlan(self.course, deep)
            row = {"deep_steps": deep, "cost_s": self.cost(plan), "error": error}
            if self.prediction is not None:
                row["predicted"] = self.prediction.of(self.errors, deep)
            tried.append(row)
        prediction = vars(self.prediction) if self.prediction else None
        return {
            "course": vars(self.course),
            "errors": self.errors,
            "prediction": prediction,
            "trials": tried,
        }
