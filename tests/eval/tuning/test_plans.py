"""Plans: their parameters, the search compared with all plans, and the prediction of errors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from eval.tuning.plans import (
    CachePlan,
    SamplingSpec,
    Way,
    ages,
    all_but,
    even,
    exact,
    find_best_within,
    fit,
    powered,
    search,
    unbeaten,
)
from sdxl.deepcache import plan_of
from sdxl.params import GenerationParams

SAMPLING = SamplingSpec(steps=10, guided_until=0.6)
STEPS = 8
LONG = SamplingSpec(steps=STEPS)
TRAINING = [even(LONG, 2), even(LONG, 3), *(all_but(LONG, n) for n in range(1, STEPS))]
NEW = CachePlan(LONG, (0, 1, 3, 4, 7))


def test_even_plans_have_an_interval_and_others_have_deep_steps() -> None:
    plain, uneven = even(SAMPLING, 3), CachePlan(SAMPLING, (0, 1, 5))
    assert plain.interval == 3 and plain.values()["deep_steps"] is None
    assert uneven.interval is None and uneven.values()["deep_steps"] == (0, 1, 5)
    assert CachePlan(SAMPLING, (0, 3, 6, 9)) == plain
    assert exact(SAMPLING).is_exact and exact(SAMPLING).interval == 1


def test_a_request_gets_the_plans_steps() -> None:
    request = CachePlan(SAMPLING, (0, 1, 5)).apply_to(GenerationParams(prompt="a ring", seed=3))
    assert (request.prompt, request.seed, request.steps) == ("a ring", 3, 10)
    steps = plan_of(request)
    assert [n for n, step in enumerate(steps) if step.is_deep] == [0, 1, 5]
    assert [n for n, step in enumerate(steps) if step.is_guided] == [0, 1, 2, 3, 4, 5]


def test_features_age_until_the_next_deep_step() -> None:
    assert ages((0, 1, 4), 7) == [0, 0, 1, 2, 0, 1, 2]


def test_the_preset_of_a_plan() -> None:
    preset = CachePlan(SAMPLING, (0, 1, 5)).preset
    assert (preset.steps, preset.scheduler, preset.deep_steps) == (10, "euler", (0, 1, 5))
    assert preset.guidance_interval == (0.0, 0.6) and preset.cache_interval == 3
    assert even(SAMPLING, 2).preset.deep_steps is None


def test_every_plan_has_its_own_slug() -> None:
    plans = [even(SAMPLING, 1), even(SAMPLING, 2), even(SamplingSpec(steps=10), 2)]
    plans += [CachePlan(SAMPLING, (0, 1)), CachePlan(SAMPLING, (0, 2))]
    assert len({plan.slug for plan in plans}) == len(plans)


def every_plan(terms: list[list[float]], deep: list[int], shallow: list[int]) -> list[Way]:
    """All plans that the terms allow, by enumeration."""
    ways = []
    for is_deep in itertools.product([True, False], repeat=len(deep) - 1):
        deep_steps = (0, *(n for n, each in enumerate(is_deep, 1) if each))
        by_step = ages(deep_steps, len(deep))
        if any(age > len(row) for age, row in zip(by_step, terms, strict=True)):
            continue
        cost = sum(s if age else d for age, d, s in zip(by_step, deep, shallow, strict=True))
        error = sum(row[age - 1] for age, row in zip(by_step, terms, strict=True) if age)
        ways.append(Way(cost, error, deep_steps))
    return ways


@pytest.mark.parametrize("seed", range(8))
def test_the_search_equals_trying_every_plan(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, oldest = 9, int(rng.integers(2, 9))
    terms = [rng.random(min(step, oldest)).tolist() for step in range(steps)]
    # Steps after the end of guidance cost about half.
    cheap = int(rng.integers(1, steps + 1))
    deep = [100 if n < cheap else 55 for n in range(steps)]
    shallow = [12 if n < cheap else 7 for n in range(steps)]
    expected = unbeaten(every_plan(terms, deep, shallow))
    ways = search(terms, deep, shallow)
    assert [way.cost for way in ways] == [way.cost for way in expected]
    assert [way.error for way in ways] == pytest.approx([way.error for way in expected])
    every = {(way.cost, way.deep_steps) for way in every_plan(terms, deep, shallow)}
    assert {(way.cost, way.deep_steps) for way in ways} <= every


def test_the_best_within_a_budget_is_the_most_expensive_unbeaten_one() -> None:
    ways = [Way(10, 3.0, (0,)), Way(20, 1.0, (0, 1)), Way(30, 0.0, (0, 1, 2))]
    assert find_best_within(ways, 29) == ways[1]
    assert find_best_within(ways, 9) is None


def some_errors(seed: int) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [(0.1 + rng.random(min(step, 6))).tolist() for step in range(STEPS)]


@pytest.mark.parametrize("power", [1, 2])
def test_the_error_of_an_untried_plan_is_predicted(power: int) -> None:
    errors, gains = some_errors(power), np.random.default_rng(9).uniform(0.2, 3, STEPS)

    def error_of(plan: CachePlan) -> float:
        return float(powered(errors, plan.deep_steps, power) @ gains) ** (1 / power)

    prediction = fit(errors, {plan.deep_steps: error_of(plan) for plan in TRAINING})
    assert prediction.power == power
    steps = zip(ages(NEW.deep_steps, STEPS), prediction.terms(errors), strict=True)
    predicted = sum(row[age - 1] for age, row in steps if age) ** (1 / power)
    assert predicted == pytest.approx(error_of(NEW), rel=0.05)


def test_without_trials_all_gains_are_equal() -> None:
    errors = some_errors(0)
    prediction = fit(errors, {even(LONG, 1).deep_steps: 0.0})
    assert prediction.gains == (1.0,) * STEPS
    terms = prediction.terms(errors)
    assert terms[3][1] == pytest.approx(errors[3][1] ** 2)
