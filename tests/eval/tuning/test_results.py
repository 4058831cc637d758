"""When a tuned plan pays, and the choice of a plan for each quality."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eval.quality.frechet import FrechetDistance, Gaussian
from eval.tuning.plans import CachePlan, SamplingSpec, even, exact
from eval.tuning.report import page
from eval.tuning.results import CheckedPlan, TuningResult, choose, judge

SAMPLING = SamplingSpec(steps=10)
PICTURES = 64
NOISE = torch.randn(PICTURES, 4, generator=torch.Generator().manual_seed(0)).double()
FRECHET = FrechetDistance(Gaussian.of([NOISE - 1]))
TUNED = CachePlan(SAMPLING, (0, 1, 2, 5))
OTHER = SamplingSpec(scheduler="ddim", steps=10)


def checked(
    plan: CachePlan, cost_s: float, clip: float = 80.0, psnr: float | None = None, apart: float = 0
) -> CheckedPlan:
    """`apart` moves the reference's features away. All plans have the same
    scatter."""
    features, scatter = NOISE + apart, NOISE[:, 0]
    findings = {"features": features, "clip": clip + scatter}
    if psnr is not None:
        findings["psnr"] = psnr + scatter
    return CheckedPlan(plan, cost_s, findings, FRECHET(features))


EXACT = checked(exact(SAMPLING), 10.0)


def pays(tuned: CheckedPlan, *plain: CheckedPlan) -> bool:
    verdict = judge(tuned, plain, EXACT, FRECHET)
    assert verdict is not None
    return verdict.pays


def test_a_nearer_plan_pays_if_no_score_is_worse() -> None:
    plain = checked(even(SAMPLING, 2), 5.0, psnr=30)
    assert pays(checked(TUNED, 5.0, psnr=33), plain)
    assert not pays(checked(TUNED, 5.0, psnr=30), plain)
    assert not pays(checked(TUNED, 5.0, psnr=33, clip=79), plain)
    assert not pays(checked(TUNED, 5.0, psnr=33, apart=0.5), plain)


def test_a_plan_with_a_better_score_pays() -> None:
    plain = checked(even(SAMPLING, 2), 5.0, psnr=30, clip=78)
    assert pays(checked(TUNED, 5.0, psnr=30, clip=80), plain)


def test_the_rival_is_the_strongest_plain_choice_that_costs_no_more() -> None:
    tuned = checked(TUNED, 5.0, psnr=33)
    weak = checked(even(SAMPLING, 3), 4.0, clip=70, psnr=20)
    strong = checked(exact(OTHER), 5.0, clip=85)
    assert pays(tuned, weak) and not pays(tuned, weak, strong)
    dearer = checked(exact(OTHER), 5.2, clip=85)
    assert pays(tuned, weak, dearer), "it costs more"
    assert judge(tuned, [dearer], EXACT, FRECHET) is None


def test_with_an_exact_fid_of_zero_the_strongest_has_the_lowest_fid() -> None:
    zero = replace(EXACT, fid=0.0)
    near = replace(checked(even(SAMPLING, 2), 5.0), fid=0.01)
    far = replace(checked(even(SAMPLING, 3), 5.0), fid=0.1)
    verdict = judge(checked(TUNED, 5.0), [far, near], zero, FRECHET)
    assert verdict is not None and verdict.strongest is near


def test_psnr_is_compared_only_between_plans_with_the_same_exact_pictures() -> None:
    unguided = SamplingSpec(steps=10, guided_until=0.5)
    near = checked(even(unguided, 2), 4.0, psnr=50)
    verdict = judge(checked(TUNED, 5.0, psnr=33), [near], EXACT, FRECHET)
    assert verdict is not None and verdict.nearest is None and not verdict.pays


@pytest.mark.parametrize(("psnr", "name"), [(33, TUNED), (30, even(SAMPLING, 2))])
def test_the_plain_plan_is_chosen_if_no_tuned_plan_pays(psnr: float, name: CachePlan) -> None:
    every = [EXACT, checked(even(SAMPLING, 2), 5.0, psnr=30), checked(TUNED, 5.0, psnr=psnr)]
    chosen = choose(every, EXACT, FRECHET, {"low": 1.0, "medium": 5.0, "high": 10.0})
    assert "low" not in chosen, "no plan costs so little"
    assert chosen["medium"].plan == name
    assert chosen["high"].plan == exact(SAMPLING)


def test_the_page_of_a_result() -> None:
    checks = [EXACT, checked(even(SAMPLING, 2), 5.0, psnr=30), checked(TUNED, 5.0, psnr=30)]
    budgets_s = {"low": 5.0, "medium": 5.0, "high": 10.0}
    result = TuningResult(checks, budgets_s, FRECHET, "a task", "a note")
    text = page(result)
    assert "No tuned plan pays here." in text and "★ fp32 euler 10, deep 0,1,2,5 | 0.500" in text
    assert "- low, up to 0.5: fp32 euler 10, interval 2" in text
    assert result.presets is not None and result.presets["medium"].deep_steps is None
