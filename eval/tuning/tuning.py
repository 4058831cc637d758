"""One run of `sdxl tune`: search the best plans of each sampling, and check them beside plain
choices. The report is rewritten after every check; an interrupted tuning resumes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path

from eval.measuring.kept_facts import check_facts
from eval.quality.frechet import FrechetDistance
from eval.quality.inputs import load_pipeline
from eval.quality.presets import check_writable, store_presets
from eval.quality.task import QualityTask
from eval.tuning.measurements import StepCosts, images_at_once, measure_costs
from eval.tuning.plans import CachePlan, SamplingSpec, even, exact
from eval.tuning.report import write_report
from eval.tuning.results import TOLERANCE, CheckedPlan, PlanCheck, TuningResult
from eval.tuning.tuned_sampling import INTERVALS, IsLate, Report, TunedSampling
from sdxl.checkpoint import Checkpoint
from sdxl.files import write_json
from sdxl.pipeline import Pipeline
from sdxl.presets import MEASURED

SETTINGS = "settings.json"
COST_IMAGES = 8
"""images in flight while costs are measured, if the engines have room"""


@dataclass
class Tuning:
    """The first value of each option is the exact model's."""

    options: argparse.Namespace
    task: QualityTask
    checkpoint: Checkpoint
    is_late: IsLate
    report: Report
    checked: list[CheckedPlan] = field(default_factory=list)
    pipelines: dict[str, Pipeline] = field(default_factory=dict)
    costs: dict[str, StepCosts] = field(default_factory=dict)

    @cached_property
    def folder(self) -> Path:
        return Path(self.options.out)

    @cached_property
    def samplings(self) -> list[SamplingSpec]:
        values = self.options
        return [
            SamplingSpec(scheduler, steps, share, precision)
            for precision, steps, share, scheduler in product(
                values.precisions, values.step_counts, values.guided_until, values.schedulers
            )
        ]

    def run(self) -> TuningResult | None:
        """Return None if time is up before a plan is checked."""
        self._open()
        for sampling in self.samplings:
            if self.is_late():
                break
            tuned = self._tuned(sampling)
            tuned.run(self.is_late, self.report)
            self._check_all(tuned)
        return self._report()

    def _open(self) -> None:
        """Prepare the folder; raise if it holds another tuning."""
        if self.options.stores_presets:
            check_writable(self.checkpoint, self.folder)
        facts = {
            "model_digest": self.checkpoint.digest,
            "backend": self.options.backend,
            "prompts": self.options.prompts,
            "exact": asdict(self.samplings[0]),
            "task": self.task.as_dict(),
        }
        if self.options.engines:
            facts["engines"] = self.options.engines
        check_facts(self.folder, SETTINGS, facts, "tuning")

    def _tuned(self, sampling: SamplingSpec) -> TunedSampling:
        return TunedSampling(
            sampling,
            self._pipeline(sampling.precision),
            self.task.requests[: self.options.prompts],
            self._costs(sampling.precision),
            sorted(self._budgets_s.values()),
            self.folder / sampling.slug,
        )

    def _check_all(self, tuned: TunedSampling) -> None:
        for plan in self._wanted(tuned):
            if any(each.plan == plan for each in self.checked):
                continue
            if self.is_late():
                return
            self.report(f"{plan}: pictures")
            pipeline = self._pipeline(plan.sampling.precision)
            self.checked.append(self._check.run(plan, self._cost_s(plan), pipeline))
            self._report()

    def _wanted(self, tuned: TunedSampling) -> Iterator[CachePlan]:
        """The exact model, then plain choices, then the tuned plans to compare with both."""
        sampling, best = tuned.sampling, tuned.best()
        yield self._check.exact_of(exact(sampling))
        yield exact(sampling)
        for cost_s in (*map(self._cost_s, best), *self._budgets_s.values()):
            yield from self._fewer_steps(sampling, cost_s)
        for interval in INTERVALS:
            yield even(sampling, interval)
        yield from best

    def _fewer_steps(self, sampling: SamplingSpec, cost_s: float) -> list[CachePlan]:
        """The exact plan with the most steps within the cost."""
        plans = (exact(replace(sampling, steps=n)) for n in range(1, sampling.steps))
        return [p for p in plans if self._cost_s(p) <= cost_s * (1 + TOLERANCE)][-1:]

    def _report(self) -> TuningResult | None:
        if not self.checked:
            return None
        frechet = FrechetDistance(self.task.load().reference)
        result = TuningResult(
            tuple(self.checked), self._budgets_s, frechet, self.task.name, self.task.note
        )
        write_report(result, self.folder)
        if (chosen := result.presets) is not None:
            measured = {"task": result.task, "pictures": result.pictures, "by": "sdxl tune"}
            is_beside = self.options.stores_presets
            store_presets(chosen, measured, self.checkpoint, self.folder, is_beside_model=is_beside)
        return result

    @cached_property
    def _check(self) -> PlanCheck:
        from_, task = self.options.prompts, self.task
        unused = replace(task, captions=task.captions[from_:], requests=task.requests[from_:])
        return PlanCheck(unused, self.folder / "checks", self.samplings[0])

    @cached_property
    def _budgets_s(self) -> dict[str, float]:
        whole_s = self._cost_s(exact(self.samplings[0]))
        shares = zip(MEASURED, self.options.budgets, strict=True)
        return {name: share * whole_s for name, share in shares}

    def _cost_s(self, plan: CachePlan) -> float:
        guidance = self.task.requests[0].guidance
        return self._costs(plan.sampling.precision).of(plan.step_plan(guidance))

    def _pipeline(self, precision: str) -> Pipeline:
        if precision not in self.pipelines:
            self.report(f"{precision}: load engines")
            self.pipelines[precision] = load_pipeline(self.options, precision)
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
        self.report(f"{precision}: time the steps")
        images = images_at_once(pipeline.engines, COST_IMAGES)
        costs = measure_costs(pipeline, self.task.requests[0], images)
        write_json(path, costs.as_dict(), indent=None)
        return costs
