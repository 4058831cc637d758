"""Whether a tuned plan is worth having: held against the strongest plain choice that costs no more,
picture by picture. Plain are exact steps, however many, and even caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from eval.measuring.bootstrap import Interval, interval
from eval.quality.frechet import QuickFrechet
from eval.tuning.checks import CheckedPlan
from eval.tuning.course import CachePlan

ROUNDS = 200
TOLERANCE = 0.01
"""Costs within it are the same."""
WORDS = {"FID": "FID", "clip": "CLIP", "right": "pixel judge", "psnr": "PSNR"}


class Gap(NamedTuple):
    """How much better one is than another; below 0 worse. The interval is of paired pictures."""

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
    """`strongest` has the best scores of its rivals, `nearest` the best PSNR of those of its
    scheduler and guidance."""

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

    def told(self) -> str:
        said = [self._said(name, gap, "") for name, gap in self.gaps.items()]
        text = f"beside {self.strongest.plan}: {', '.join(said)}"
        if self.nearest is not None and self.nearness is not None:
            text += f"; beside {self.nearest.plan}: {self._said('psnr', self.nearness, ' dB')}"
        return f"{'pays' if self.pays else 'does not pay'}: {text}"

    def _said(self, name: str, gap: Gap, unit: str) -> str:
        word = "better" if gap.is_better else "worse" if gap.is_worse else "no clear difference"
        low, high = gap.interval.low, gap.interval.high
        return f"{WORDS[name]} {word} ({gap.value:+.3g}{unit}, {low:+.3g} to {high:+.3g})"


def judge(
    tuned: CheckedPlan,
    plain: Sequence[CheckedPlan],
    exact: CheckedPlan,
    quick: QuickFrechet,
    budget_s: float | None = None,
) -> TuningVerdict | None:
    """Against plain ones within the budget, or at the plan's own cost; None where there are none.
    `exact` is what FID and CLIP are shares of."""
    most = (1 + TOLERANCE) * (tuned.cost_s if budget_s is None else budget_s)
    rivals = [each for each in plain if each.cost_s <= most]
    if not rivals:
        return None
    strongest = min(rivals, key=lambda each: each.loss_to(exact))
    alike = [each for each in rivals if is_of_same_exact(each.plan, tuned.plan)]
    # The exact pictures themselves have no PSNR, and nothing is nearer than they are.
    near = alike if all("psnr" in each.findings for each in alike) else []
    nearest = max(near, key=lambda each: each.scores["psnr"], default=None)
    names = [name for name in ("clip", "right") if name in tuned.findings]
    gaps = {"FID": fid_gap(tuned, strongest, quick)}
    gaps |= {name: gap(tuned, strongest, name) for name in names}
    nearness = gap(tuned, nearest, "psnr") if nearest else None
    return TuningVerdict(tuned, strongest, gaps, nearest, nearness)


def is_of_same_exact(one: CachePlan, other: CachePlan) -> bool:
    """PSNR means something only between pictures that are held against the same ones."""
    mine, theirs = one.course, other.course
    return (mine.scheduler, mine.guided_until) == (theirs.scheduler, theirs.guided_until)


def gap(one: CheckedPlan, other: CheckedPlan, name: str) -> Gap:
    apart = one.findings[name].double() - other.findings[name].double()
    value = float(apart.mean())
    return Gap(value, interval(value, lambda rows: float(apart[rows].mean()), len(apart), ROUNDS))


def fid_gap(one: CheckedPlan, other: CheckedPlan, quick: QuickFrechet) -> Gap:
    """Less is better. Both are drawn anew together, so what the captions do to both cancels."""
    mine, theirs = one.findings["features"], other.findings["features"]

    def apart(rows: Tensor) -> float:
        return quick(theirs[rows]) - quick(mine[rows])

    value = other.fid - one.fid
    return Gap(value, interval(value, apart, len(mine), ROUNDS))


def strongest_within(
    plain: Iterable[CheckedPlan], exact: CheckedPlan, budget_s: float
) -> CheckedPlan | None:
    within = [each for each in plain if each.cost_s <= budget_s * (1 + TOLERANCE)]
    return min(within, key=lambda each: each.loss_to(exact), default=None)


def choose(
    checked: Sequence[CheckedPlan],
    exact: CheckedPlan,
    quick: QuickFrechet,
    budgets_s: Mapping[str, float],
) -> dict[str, CheckedPlan]:
    """For each name's budget the strongest plain choice, or a tuned plan that pays beside it."""
    plain = [each for each in checked if each.plan.has_even_caches]
    found: dict[str, CheckedPlan] = {}
    for name, budget_s in budgets_s.items():
        best = strongest_within(plain, exact, budget_s)
        if best is None:
            continue
        worthy = [
            each
            for each in checked
            if not each.plan.has_even_caches
            and each.cost_s <= budget_s * (1 + TOLERANCE)
            and (verdict := judge(each, plain, exact, quick, budget_s)) is not None
            and verdict.pays
        ]
        found[name] = min(worthy, key=lambda each: each.loss_to(exact), default=best)
    return found
