"""What trials teach about steps' gains, and whether errors add up or their squares do."""

from __future__ import annotations

import numpy as np
import pytest

from eval.tuning.course import CachePlan, Course, all_but, even
from eval.tuning.prediction import fit, powered

STEPS = 8
COURSE = Course(steps=STEPS)
TAUGHT = [even(COURSE, 2), even(COURSE, 3), *(all_but(COURSE, n) for n in range(1, STEPS))]
NEW = CachePlan(COURSE, (0, 1, 3, 4, 7))


def some_errors(seed: int) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [(0.1 + rng.random(min(step, 6))).tolist() for step in range(STEPS)]


@pytest.mark.parametrize("power", [1, 2])
def test_a_plan_that_was_not_tried_is_predicted_from_those_that_were(power: int) -> None:
    errors, gains = some_errors(power), np.random.default_rng(9).uniform(0.2, 3, STEPS)

    def error_of(plan: CachePlan) -> float:
        return float(powered(errors, plan.deep_steps, power) @ gains) ** (1 / power)

    found = fit(errors, {plan.deep_steps: error_of(plan) for plan in TAUGHT})
    assert found.power == power
    assert found.of(errors, NEW.deep_steps) == pytest.approx(error_of(NEW), rel=0.05)


def test_without_trials_every_step_counts_the_same() -> None:
    errors = some_errors(0)
    found = fit(errors, {COURSE_DEEP: 0.0})
    assert found.gains == (1.0,) * STEPS
    terms = found.terms(errors)
    assert terms[3][1] == pytest.approx(errors[3][1] ** 2)


COURSE_DEEP = even(COURSE, 1).deep_steps
