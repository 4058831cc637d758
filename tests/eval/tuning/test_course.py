"""Plans by their deep steps, and the parameters of a picture that follow."""

from __future__ import annotations

from eval.tuning.course import CachePlan, Course, ages, even, exact
from sdxl.deepcache import plan_of
from sdxl.params import GenerationParams

COURSE = Course(steps=10, guided_until=0.6)


def test_an_even_plan_is_asked_for_by_its_interval_and_another_by_its_steps() -> None:
    plain, own = even(COURSE, 3), CachePlan(COURSE, (0, 1, 5))
    assert plain.interval == 3 and plain.values()["deep_steps"] is None
    assert own.interval is None and own.values()["deep_steps"] == (0, 1, 5)
    assert CachePlan(COURSE, (0, 3, 6, 9)) == plain, "whoever proposed it"
    assert exact(COURSE).is_exact and exact(COURSE).interval == 1


def test_a_picture_is_made_as_the_plan_says() -> None:
    asked = CachePlan(COURSE, (0, 1, 5)).apply_to(GenerationParams(prompt="a ring", seed=3))
    assert (asked.prompt, asked.seed, asked.steps) == ("a ring", 3, 10)
    steps = plan_of(asked)
    assert [n for n, step in enumerate(steps) if step.is_deep] == [0, 1, 5]
    assert [n for n, step in enumerate(steps) if step.is_guided] == [0, 1, 2, 3, 4, 5]


def test_features_age_until_the_next_deep_step() -> None:
    assert ages((0, 1, 4), 7) == [0, 0, 1, 2, 0, 1, 2]


def test_a_quality_can_stand_for_a_plan() -> None:
    found = CachePlan(COURSE, (0, 1, 5)).preset
    assert (found.steps, found.scheduler, found.deep_steps) == (10, "euler", (0, 1, 5))
    assert found.guidance_interval == (0.0, 0.6) and found.cache_interval == 3
    assert even(COURSE, 2).preset.deep_steps is None


def test_plans_have_folders_of_their_own() -> None:
    plans = [even(COURSE, 1), even(COURSE, 2), CachePlan(COURSE, (0, 1)), CachePlan(COURSE, (0, 2))]
    plans += [even(Course(steps=10), 2)]
    assert len({plan.slug for plan in plans}) == len(plans)
