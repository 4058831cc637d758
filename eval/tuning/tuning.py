"""`sdxl tune`, after its flags are read: each course is searched, and what was found is checked
beside plain choices. The report is renewed after every check, and a tuning that was killed goes on
where it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path

import engines
from eval.measuring.kept_facts import check_facts
from eval.quality.frechet import QuickFrechet
from eval.quality.presets import check_writable, store_presets
from eval.quality.task import QualityTask
from eval.tuning.checks import CheckedPlan, PlanCheck
from eval.tuning.course import CachePlan, Course, even, exact
from eval.tuning.local_errors import images_at_once
from eval.tuning.plot import plot_tuning
from eval.tuning.report import STEM, write_report
from eval.tuning.result import TuningResult
from eval.tuning.step_costs import StepCosts, measure_costs
from eval.tuning.tuned_course import INTERVALS, IsLate, Tell, TunedCourse
from eval.tuning.verdict import TOLERANCE
from sdxl.checkpoint import Checkpoint
from sdxl.files import write_json
from sdxl.mini.scenes import Scene
from sdxl.pipeline import Pipeline

SETTINGS = "settings.json"
COST_IMAGES = 8
"""in flight while costs are measured, where the engines take so many"""


@dataclass(frozen=True)
class TuningSpec:
    """What is asked. What is named first of each is the exact model that all is held against."""

    model: str
    backend: str
    precisions: tuple[str, ...]
    schedulers: tuple[str, ...]
    steps: tuple[int, ...]
    guided_until: tuple[float, ...]
    budgets: Mapping[str, float]
    """shares of the exact model's cost, by quality"""
    prompts: int
    """captions to tune on, the task's first; plans are checked on the others"""
    folder: str = ""
    takes_unchecked: bool = False
    """of engines, both"""

    def courses(self) -> list[Course]:
        every = product(self.precisions, self.steps, self.guided_until, self.schedulers)
        return [Course(name, steps, share, precision) for precision, steps, share, name in every]


@dataclass
class Tuning:
    """`scenes` are what the task's captions tell, where they are of drawn scenes."""

    spec: TuningSpec
    task: QualityTask
    checkpoint: Checkpoint
    scenes: list[Scene] | None
    folder: Path
    is_late: IsLate
    tell: Tell
    stores_presets: bool = False
    """beside the model too, whose `quality` means them from then on"""
    tuned: list[TunedCourse] = field(default_factory=list)
    checked: list[CheckedPlan] = field(default_factory=list)
    pipelines: dict[str, Pipeline] = field(default_factory=dict)
    costs: dict[str, StepCosts] = field(default_factory=dict)

    def run(self) -> TuningResult | None:
        """None where time was up before anything was checked."""
        self._open()
        for course in self.spec.courses():
            if self.is_late():
                break
            tuned = self._course(course)
            tuned.run(self.is_late, self.tell)
            self.tuned.append(tuned)
            self._check_all(tuned)
            if result := self._report():
                plot_tuning(result, self.folder / STEM)
        return self._report()

    # -- parts ------------------------------------------------------------------------------

    def _open(self) -> None:
        """Go on with what is there, where it is of the same tuning."""
        if self.stores_presets:
            check_writable(self.checkpoint, self.folder)
        facts = {
            "model_digest": self.checkpoint.digest,
            "backend": self.spec.backend,
            "prompts": self.spec.prompts,
            "exact": asdict(self.spec.courses()[0]),
            "task": self.task.as_dict(),
        }
        if self.spec.folder:
            facts["engines"] = self.spec.folder
        check_facts(self.folder, SETTINGS, facts, "tuning")

    def _course(self, course: Course) -> TunedCourse:
        return TunedCourse(
            course,
            self._pipeline(course.precision),
            self.task.requests[: self.spec.prompts],
            self._costs(course.precision),
            sorted(self._budgets_s.values()),
            self.folder / course.slug,
        )

    def _check_all(self, tuned: TunedCourse) -> None:
        for plan in self._wanted(tuned):
            if any(each.plan == plan for each in self.checked):
                continue
            if self.is_late():
                return
            self.tell(f"{plan}: pictures")
            pipeline = self._pipeline(plan.course.precision)
            self.checked.append(self._check.run(plan, self._cost_s(plan), pipeline))
            self._report()

    def _wanted(self, tuned: TunedCourse) -> Iterator[CachePlan]:
        """The exact model first, then plain choices, then tuned plans, which are held against all
        of those."""
        course, found = tuned.course, tuned.best()
        yield self._check.exact_of(exact(course))
        yield exact(course)
        for cost_s in (*map(self._cost_s, found), *self._budgets_s.values()):
            yield from self._fewer_steps(course, cost_s)
        for interval in INTERVALS:
            yield even(course, interval)
        yield from found

    def _fewer_steps(self, course: Course, cost_s: float) -> list[CachePlan]:
        """As many exact steps as cost no more."""
        plans = (exact(replace(course, steps=n)) for n in range(1, course.steps))
        return [p for p in plans if self._cost_s(p) <= cost_s * (1 + TOLERANCE)][-1:]

    def _report(self) -> TuningResult | None:
        if not self.checked:
            return None
        quick = QuickFrechet(self.task.load().reference)
        budgets_s = self._budgets_s
        result = TuningResult(
            tuple(self.checked), tuple(self.tuned), budgets_s, quick, self.task.name, self.task.note
        )
        write_report(result, self.folder)
        self._store(result)
        return result

    def _store(self, result: TuningResult) -> None:
        if (chosen := result.presets) is None:
            return
        measured = {"task": result.task, "pictures": result.pictures, "by": "sdxl tune"}
        place, is_beside = self.checkpoint, self.stores_presets
        store_presets(chosen, measured, place, self.folder, is_beside_model=is_beside)

    # -- what is made once ------------------------------------------------------------------

    @cached_property
    def _check(self) -> PlanCheck:
        from_, task = self.spec.prompts, self.task
        rest = replace(task, captions=task.captions[from_:], requests=task.requests[from_:])
        scenes = None if self.scenes is None else self.scenes[from_:]
        return PlanCheck(rest, self.folder / "checks", self.spec.courses()[0], scenes)

    @cached_property
    def _budgets_s(self) -> dict[str, float]:
        whole_s = self._cost_s(exact(self.spec.courses()[0]))
        return {name: share * whole_s for name, share in self.spec.budgets.items()}

    def _cost_s(self, plan: CachePlan) -> float:
        guidance = self.task.requests[0].guidance
        return self._costs(plan.course.precision).of(plan.step_plan(guidance))

    def _pipeline(self, precision: str) -> Pipeline:
        if precision not in self.pipelines:
            self.tell(f"{precision}: engines are loaded")
            spec = self.spec
            self.pipelines[precision] = engines.load(
                spec.model,
                spec.backend,
                precision=precision,
                folder=spec.folder,
                takes_unchecked=spec.takes_unchecked,
            )
        return self.pipelines[precision]

    def _costs(self, precision: str) -> StepCosts:
        if precision not in self.costs:
            self.costs[precision] = self._stored_costs(precision)
        return self.costs[precision]

    def _stored_costs(self, precision: str) -> StepCosts:
        path = self.folder / f"costs-{precision}.json"
        if path.exists():
            return StepCosts.from_dict(json.loads(path.read_text(encoding="utf-8")))
        pipeline = self._pipeline(precision)
        self.tell(f"{precision}: steps are timed")
        images = images_at_once(pipeline.engines, COST_IMAGES)
        found = measure_costs(pipeline, self.task.requests[0], images)
        write_json(path, found.as_dict(), indent=None)
        return found
