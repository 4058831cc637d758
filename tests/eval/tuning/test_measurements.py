"""The errors of single steps and of whole plans, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval.tuning.measurements import PlanTrials, PromptedImages, images_at_once, measure_errors
from eval.tuning.plans import SamplingSpec, all_but, exact
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline

REQUESTS = tuple(GenerationParams(f"a {c} ring", seed=i) for i, c in enumerate(("red", "blue")))


@pytest.mark.parametrize("guided_until", [1.0, 0.5])
@pytest.mark.parametrize("scheduler", ["euler", "dpmpp_2m"])
def test_the_error_of_the_last_step_equals_that_of_its_plan(
    scheduler: str, guided_until: float, mini: Pipeline, tmp_path: Path
) -> None:
    """No later step changes the last step's error."""
    sampling = SamplingSpec(scheduler, 4, guided_until)
    errors = measure_errors(mini, sampling, REQUESTS, tmp_path / "errors.json", oldest=2)
    assert [len(row) for row in errors] == [0, 1, 2, 2]
    trials = PlanTrials(PromptedImages(mini, REQUESTS), sampling, tmp_path / "trials.json")
    assert trials.run(exact(sampling)) == 0
    assert trials.run(all_but(sampling, 3)) == pytest.approx(errors[3][0], rel=0.01)


def test_stored_measurements_and_trials_are_reused(
    mini: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingSpec(steps=4)
    place, tried = tmp_path / "errors.json", tmp_path / "trials.json"
    errors = measure_errors(mini, sampling, REQUESTS[:1], place, oldest=2)
    images = PromptedImages(mini, REQUESTS[:1])
    error = PlanTrials(images, sampling, tried).run(all_but(sampling, 2))

    def refuse(*_: Any) -> None:
        raise AssertionError("denoised again")

    monkeypatch.setattr(PromptedImages, "latents", refuse)
    assert measure_errors(mini, sampling, REQUESTS[:1], place, oldest=2) == errors
    assert PlanTrials(images, sampling, tried).run(all_but(sampling, 2)) == error


def test_a_group_fills_a_bucket_with_and_without_guidance(mini: Pipeline) -> None:
    assert images_at_once(mini.engines, 1) == 1
    assert images_at_once(mini.engines, 7) == 4
