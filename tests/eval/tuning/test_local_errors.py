"""The probe beside the loop, and what is kept of trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval.tuning.course import Course, all_but, exact
from eval.tuning.local_errors import images_at_once, measure_errors
from eval.tuning.trials import PlanTrials, PromptedImages
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline

REQUESTS = tuple(GenerationParams(f"a {c} ring", seed=i) for i, c in enumerate(("red", "blue")))


@pytest.mark.parametrize("guided_until", [1.0, 0.5])
@pytest.mark.parametrize("scheduler", ["euler", "dpmpp_2m"])
def test_a_single_step_is_measured_as_a_whole_plan_would_be(
    scheduler: str, guided_until: float, mini: Pipeline, tmp_path: Path
) -> None:
    """What the last step changes in the latents, no later one moves."""
    course = Course(scheduler, 4, guided_until)
    errors = measure_errors(mini, course, REQUESTS, tmp_path / "errors.json", oldest=2)
    assert [len(row) for row in errors] == [0, 1, 2, 2]
    trials = PlanTrials(PromptedImages(mini, REQUESTS), course, tmp_path / "trials.json")
    assert trials.run(exact(course)) == 0
    assert trials.run(all_but(course, 3)) == pytest.approx(errors[3][0], rel=0.01)


def test_what_was_measured_and_tried_is_not_done_again(
    mini: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = Course(steps=4)
    place, tried = tmp_path / "errors.json", tmp_path / "trials.json"
    errors = measure_errors(mini, course, REQUESTS[:1], place, oldest=2)
    images = PromptedImages(mini, REQUESTS[:1])
    found = PlanTrials(images, course, tried).run(all_but(course, 2))

    def refuse(*_: Any) -> None:
        raise AssertionError("denoised again")

    monkeypatch.setattr(PromptedImages, "latents", refuse)
    assert measure_errors(mini, course, REQUESTS[:1], place, oldest=2) == errors
    assert PlanTrials(images, course, tried).run(all_but(course, 2)) == found


def test_a_measured_group_fills_a_bucket_with_guidance_and_without(mini: Pipeline) -> None:
    assert images_at_once(mini.engines, 1) == 1
    assert images_at_once(mini.engines, 7) == 4
