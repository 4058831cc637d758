"""When a tuned plan is worth having, and what is stored where it is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eval.quality.frechet import Gaussian, QuickFrechet
from eval.tuning.checks import CheckedPlan
from eval.tuning.course import CachePlan, Course, even, exact
from eval.tuning.plot import plot_tuning
from eval.tuning.report import page
from eval.tuning.result import TuningResult
from eval.tuning.verdict import choose, judge

COURSE = Course(steps=10)
PICTURES = 64
NOISE = torch.randn(PICTURES, 4, generator=torch.Generator().manual_seed(0)).double()
QUICK = QuickFrechet(Gaussian.of([NOISE - 1]))
TUNED = CachePlan(COURSE, (0, 1, 2, 5))
OTHER = Course(scheduler="ddim", steps=10)


def checked(
    plan: CachePlan, cost_s: float, clip: float = 80.0, psnr: float | None = None, apart: float = 0
) -> CheckedPlan:
    """`apart` moves its features away from the reference's. Pictures scatter alike in all plans."""
    features, scatter = NOISE + apart, NOISE[:, 0]
    findings = {"features": features, "clip": clip + scatter, "right": torch.ones(PICTURES)}
    if psnr is not None:
        findings["psnr"] = psnr + scatter
    return CheckedPlan(plan, cost_s, findings, QUICK(features))


EXACT = checked(exact(COURSE), 10.0)


def verdict(tuned: CheckedPlan, *plain: CheckedPlan) -> bool:
    found = judge(tuned, plain, EXACT, QUICK)
    assert found is not None
    return found.pays


def test_a_plan_pays_that_is_nearer_where_no_score_is_worse() -> None:
    plain = checked(even(COURSE, 2), 5.0, psnr=30)
    assert verdict(checked(TUNED, 5.0, psnr=33), plain)
    assert not verdict(checked(TUNED, 5.0, psnr=30), plain)
    assert not verdict(checked(TUNED, 5.0, psnr=33, clip=79), plain)
    assert not verdict(checked(TUNED, 5.0, psnr=33, apart=0.5), plain)


def test_a_plan_pays_whose_score_is_better() -> None:
    plain = checked(even(COURSE, 2), 5.0, psnr=30, clip=78)
    assert verdict(checked(TUNED, 5.0, psnr=30, clip=80), plain)


def test_a_rival_is_whatever_costs_no_more_and_the_strongest_counts() -> None:
    tuned = checked(TUNED, 5.0, psnr=33)
    weak, strong = (
        checked(even(COURSE, 3), 4.0, clip=70, psnr=20),
        checked(exact(OTHER), 5.0, clip=85),
    )
    assert verdict(tuned, weak) and not verdict(tuned, weak, strong)
    dearer = checked(exact(OTHER), 5.2, clip=85)
    assert verdict(tuned, weak, dearer), "it costs more"
    assert judge(tuned, [dearer], EXACT, QUICK) is None


def test_where_the_exact_pictures_are_the_reference_the_strongest_is_the_nearest_of_them() -> None:
    own = replace(EXACT, fid=0.0)
    near, far = (
        replace(checked(even(COURSE, n), 5.0), fid=fid) for n, fid in ((2, 0.01), (3, 0.1))
    )
    found = judge(checked(TUNED, 5.0), [far, near], own, QUICK)
    assert found is not None and found.strongest is near


def test_nearness_is_compared_only_with_plans_of_the_same_exact_pictures() -> None:
    unguided = Course(steps=10, guided_until=0.5)
    near = checked(even(unguided, 2), 4.0, psnr=50)
    found = judge(checked(TUNED, 5.0, psnr=33), [near], EXACT, QUICK)
    assert found is not None and found.nearest is None and not found.pays


@pytest.mark.parametrize(("psnr", "name"), [(33, TUNED), (30, even(COURSE, 2))])
def test_where_no_tuned_plan_pays_the_plain_one_is_chosen(psnr: float, name: CachePlan) -> None:
    every = [EXACT, checked(even(COURSE, 2), 5.0, psnr=30), checked(TUNED, 5.0, psnr=psnr)]
    found = choose(every, EXACT, QUICK, {"low": 1.0, "medium": 5.0, "high": 10.0})
    assert "low" not in found, "nothing costs so little"
    assert found["medium"].plan == name
    assert found["high"].plan == exact(COURSE)


@pytest.mark.slow
def test_a_report_says_where_nothing_pays_and_draws_what_was_checked(tmp_path: Path) -> None:
    checks = [EXACT, checked(even(COURSE, 2), 5.0, psnr=30), checked(TUNED, 5.0, psnr=30)]
    budgets_s = {"low": 5.0, "medium": 5.0, "high": 10.0}
    found = TuningResult(checks, [], budgets_s, QUICK, "a task", "a note")
    text = page(found)
    assert "No tuned plan pays here." in text and "★ fp32 euler 10, deep 0,1,2,5 | 0.500" in text
    assert "- low, up to 0.5: fp32 euler 10, interval 2" in text
    assert found.presets is not None and found.presets["medium"].deep_steps is None
    plot_tuning(found, tmp_path / "tuning")
    assert (tmp_path / "tuning.png").read_bytes().startswith(b"\x89PNG")
