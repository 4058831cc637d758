"""What a tuning has found so far: plans that were checked, verdicts on tuned ones, and which plan
each quality's name should stand for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from eval.quality.frechet import QuickFrechet
from eval.tuning.checks import CheckedPlan
from eval.tuning.tuned_course import TunedCourse
from eval.tuning.verdict import TuningVerdict, choose, judge
from sdxl.presets import EXACT, MEASURED, Presets


@dataclass(frozen=True)
class TuningResult:
    """`checked[0]` is the exact model."""

    checked: Sequence[CheckedPlan]
    tuned: Sequence[TunedCourse]
    budgets_s: Mapping[str, float]
    """what an image may cost, by quality"""
    quick: QuickFrechet
    task: str
    note: str

    @property
    def exact(self) -> CheckedPlan:
        return self.checked[0]

    def share(self, checked: CheckedPlan) -> float:
        """Of the exact model's cost."""
        return checked.cost_s / self.exact.cost_s

    @property
    def pictures(self) -> int:
        return len(self.exact.findings["clip"])

    @cached_property
    def plain(self) -> list[CheckedPlan]:
        return [each for each in self.checked if each.plan.has_even_caches]

    @cached_property
    def verdicts(self) -> list[TuningVerdict]:
        own = [each for each in self.checked if not each.plan.has_even_caches]
        found = (judge(each, self.plain, self.exact, self.quick) for each in own)
        return [verdict for verdict in found if verdict is not None]

    @cached_property
    def chosen(self) -> dict[str, CheckedPlan]:
        """Of the exact model's own precision: which engines run is not a picture's to say."""
        precision = self.exact.plan.course.precision
        own = [each for each in self.checked if each.plan.course.precision == precision]
        return choose(own, self.exact, self.quick, self.budgets_s)

    @property
    def presets(self) -> Presets | None:
        """None until each quality has a plan."""
        if set(self.chosen) != set(MEASURED):
            return None
        return {name: self.chosen[name].plan.preset for name in MEASURED} | EXACT

    def as_dict(self) -> dict[str, Any]:
        verdicts = [
            {"plan": v.tuned.plan.as_dict(), "pays": v.pays, "told": v.told()}
            for v in self.verdicts
        ]
        return {
            "task": self.task,
            "note": self.note,
            "pictures": self.pictures,
            "checked": [each.as_dict() for each in self.checked],
            "verdicts": verdicts,
            "chosen": {name: each.plan.as_dict() for name, each in self.chosen.items()},
            "courses": [each.as_dict() for each in self.tuned],
        }
