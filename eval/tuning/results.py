"""The results of a tuning: plans checked on whole pictures of unused captions, the comparison of
tuned plans with plain choices, and the plan for each quality. Plain choices are exact steps and
even intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from eval.measuring.bootstrap import Interval, interval, resample
from eval.quality.evaluation import Evaluation, Findings
from eval.quality.frechet import FrechetDistance
from eval.quality.pareto import Change
from eval.quality.sources import Folder, Painted
from eval.quality.task import QualityTask
from eval.tuning.plans import CachePlan, SamplingSpec, exact
from sdxl.pipeline import Pipeline
from sdxl.presets import EXACT, MEASURED, Presets

NO_FID = 1e-6
ROUNDS = 200
TOLERANCE = 0.01
"""costs with a smaller relative difference count as equal"""


@dataclass(frozen=True)
class CheckedPlan:
    plan: CachePlan
    cost_s: float
    """of an image's steps"""
    findings: Findings
    fid: float

    @property
    def scores(self) -> dict[str, float]:
        names = [name for name in ("clip", "psnr") if name in self.findings]
        return {"FID": self.fid} | {n: float(self.findings[n].double().mean()) for n in names}

    def loss_to(self, exact: CheckedPlan) -> float:
        """The worse change of FID and CLIP in units of MLPerf's gates; see pareto.Change. If the
        exact pictures are the reference, their FID is 0, and any larger FID is a loss."""
        scores, expected = self.scores, exact.scores
        fid = scores["FID"] / max(expected["FID"], NO_FID) - 1
        return Change(fid, scores["clip"] / expected["clip"] - 1).loss

    def as_dict(self) -> dict[str, Any]:
        return {**self.plan.as_dict(), "cost_s": self.cost_s, **self.scores}


@dataclass(frozen=True)
class PlanCheck:
    """Compares pictures with exact pictures of the same scheduler and guidance, which have the
    steps and precision of `reference`."""

    task: QualityTask
    folder: Path
    reference: SamplingSpec

    def run(self, plan: CachePlan, cost_s: float, pipeline: Pipeline) -> CheckedPlan:
        """Check a plan. The exact plan with its scheduler and guidance must be checked before."""
        folder = self.folder / plan.slug
        requests = tuple(plan.apply_to(request) for request in self.task.requests)
        task = replace(self.task, requests=requests)
        reference = self.exact_of(plan)
        pictures = self.folder / reference.slug / "pictures"
        source = None if plan == reference else Folder(pictures, task)
        painted = Painted(pipeline, requests)
        evaluation = Evaluation(task, painted, folder, source, folder / "pictures")
        evaluation.run(1)
        findings = evaluation.findings()
        frechet = FrechetDistance(self.task.load().reference)
        return CheckedPlan(plan, cost_s, findings, frechet(findings["features"]))

    def exact_of(self, plan: CachePlan) -> CachePlan:
        scheduler, share = plan.sampling.scheduler, plan.sampling.guided_until
        return exact(replace(self.reference, scheduler=scheduler, guided_until=share))


class Gap(NamedTuple):
    """How much better one plan is than another; negative is worse. The interval is of pairs."""

    value: float
    interval: Interval

    @property
    def is_better(self) -> bool:
        return self.interval.low > 0

    @property
    def is_worse(self) -> bool:
        return self.interval.high < 0


@dataclass(frozen=True)
class TuningVerdict:
    """A tuned plan beside its rivals: `strongest` has the best scores; `nearest` has the best PSNR
    among rivals with the same scheduler and guidance."""

    tuned: CheckedPlan
    strongest: CheckedPlan
    gaps: Mapping[str, Gap]
    nearest: CheckedPlan | None
    nearness: Gap | None

    @property
    def pays(self) -> bool:
        """No score is clearly worse, and a score is clearly better or the pictures are nearer."""
        is_nearer = self.nearness is not None and self.nearness.is_better
        gaps = self.gaps.values()
        return not any(g.is_worse for g in gaps) and (is_nearer or any(g.is_better for g in gaps))

    def __str__(self) -> str:
        gaps = [self._describe(name, gap, "") for name, gap in self.gaps.items()]
        text = f"beside {self.strongest.plan}: {', '.join(gaps)}"
        if self.nearest is not None and self.nearness is not None:
            text += f"; beside {self.nearest.plan}: {self._describe('psnr', self.nearness, ' dB')}"
        return f"{'pays' if self.pays else 'does not pay'}: {text}"

    def _describe(self, name: str, gap: Gap, unit: str) -> str:
        word = "better" if gap.is_better else "worse" if gap.is_worse else "no clear difference"
        low, high = gap.interval.low, gap.interval.high
        return f"{name.upper()} {word} ({gap.value:+.3g}{unit}, {low:+.3g} to {high:+.3g})"


def judge(
    tuned: CheckedPlan,
    plain: Sequence[CheckedPlan],
    exact: CheckedPlan,
    frechet: FrechetDistance,
    budget_s: float | None = None,
) -> TuningVerdict | None:
    """Compare with the plain choices within the budget, by default the plan's cost. None if no
    plain choice is within it. FID and CLIP are relative to `exact`."""
    rivals = list_affordable(plain, tuned.cost_s if budget_s is None else budget_s)
    if not rivals:
        return None
    strongest = min(rivals, key=lambda each: each.loss_to(exact))
    alike = [each for each in rivals if shares_exact_pictures(each.plan, tuned.plan)]
    # The exact plan has no PSNR; if it is a rival, no picture is nearer.
    near = alike if all("psnr" in each.findings for each in alike) else []
    nearest = max(near, key=lambda each: each.scores["psnr"], default=None)
    gaps = {"FID": compare_fid(tuned, strongest, frechet)}
    gaps["clip"] = compare_means(tuned, strongest, "clip")
    nearness = compare_means(tuned, nearest, "psnr") if nearest else None
    return TuningVerdict(tuned, strongest, gaps, nearest, nearness)


def shares_exact_pictures(one: CachePlan, other: CachePlan) -> bool:
    """True if both plans are compared with the same exact pictures, so that their PSNR compares."""
    a, b = one.sampling, other.sampling
    return (a.scheduler, a.guided_until) == (b.scheduler, b.guided_until)


def compare_means(one: CheckedPlan, other: CheckedPlan, name: str) -> Gap:
    gaps = one.findings[name].double() - other.findings[name].double()
    value = float(gaps.mean())
    means = resample(lambda rows: float(gaps[rows].mean()), len(gaps), ROUNDS)
    return Gap(value, interval(value, means))


def compare_fid(one: CheckedPlan, other: CheckedPlan, frechet: FrechetDistance) -> Gap:
    """Lower FID is better. Both sets are resampled together, so the captions' influence cancels."""
    features, others = one.findings["features"], other.findings["features"]

    def score(rows: Tensor) -> float:
        return frechet(others[rows]) - frechet(features[rows])

    value = other.fid - one.fid
    return Gap(value, interval(value, resample(score, len(features), ROUNDS)))


def list_affordable(plans: Iterable[CheckedPlan], budget_s: float) -> list[CheckedPlan]:
    return [each for each in plans if each.cost_s <= budget_s * (1 + TOLERANCE)]


def choose(
    checked: Sequence[CheckedPlan],
    exact: CheckedPlan,
    frechet: FrechetDistance,
    budgets_s: Mapping[str, float],
) -> dict[str, CheckedPlan]:
    """For each budget, the strongest tuned plan that pays, or else the strongest plain choice."""
    plain = [each for each in checked if each.plan.has_even_caches]
    chosen: dict[str, CheckedPlan] = {}
    for name, budget_s in budgets_s.items():
        tuned = (e for e in list_affordable(checked, budget_s) if not e.plan.has_even_caches)
        verdicts = (judge(each, plain, exact, frechet, budget_s) for each in tuned)
        paying = [verdict.tuned for verdict in verdicts if verdict is not None and verdict.pays]
        if choices := paying or list_affordable(plain, budget_s):
            chosen[name] = min(choices, key=lambda each: each.loss_to(exact))
    return chosen


@dataclass(frozen=True)
class TuningResult:
    """`checked[0]` is the exact model."""

    checked: Sequence[CheckedPlan]
    budgets_s: Mapping[str, float]
    """the most that an image may cost, by quality"""
    frechet: FrechetDistance
    task: str
    note: str

    @property
    def exact(self) -> CheckedPlan:
        return self.checked[0]

    def share(self, checked: CheckedPlan) -> float:
        """The cost as a share of the exact model's."""
        return checked.cost_s / self.exact.cost_s

    @property
    def pictures(self) -> int:
        return len(self.exact.findings["clip"])

    @cached_property
    def verdicts(self) -> list[TuningVerdict]:
        plain = [each for each in self.checked if each.plan.has_even_caches]
        tuned = (each for each in self.checked if not each.plan.has_even_caches)
        verdicts = (judge(each, plain, self.exact, self.frechet) for each in tuned)
        return [verdict for verdict in verdicts if verdict is not None]

    @cached_property
    def chosen(self) -> dict[str, CheckedPlan]:
        """Plans of the exact model's precision, because a preset cannot choose the engines."""
        precision = self.exact.plan.sampling.precision
        eligible = [each for each in self.checked if each.plan.sampling.precision == precision]
        return choose(eligible, self.exact, self.frechet, self.budgets_s)

    @property
    def presets(self) -> Presets | None:
        """None until every quality has a plan."""
        if set(self.chosen) != set(MEASURED):
            return None
        return {name: self.chosen[name].plan.preset for name in MEASURED} | EXACT

    def as_dict(self) -> dict[str, Any]:
        verdicts = [
            {"plan": v.tuned.plan.as_dict(), "pays": v.pays, "told": str(v)} for v in self.verdicts
        ]
        return {
            "task": self.task,
            "note": self.note,
            "pictures": self.pictures,
            "checked": [each.as_dict() for each in self.checked],
            "verdicts": verdicts,
            "chosen": {name: each.plan.as_dict() for name, each in self.chosen.items()},
        }
