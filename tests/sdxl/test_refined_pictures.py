"""Pictures whose last steps a refiner takes, against diffusers' two pipelines and a plain loop, and
among others in flight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.pytorch.torch_engine import load_torch
from sdxl.attachments import Lora
from sdxl.checkpoint import find_refiner
from sdxl.controls import Control
from sdxl.params import GenerationParams, InvalidParams
from sdxl.picture_files import file_of
from sdxl.pipeline import Pipeline, WithPictures
from sdxl.refiner import Refiner
from tests.conftest import assert_as_alone, assert_picture, images_of, psnr
from tests.sdxl.test_editing import drawing, edit
from tests.sdxl.test_pipeline import PROMPT
from tests.sdxl.their_schedulers import diffusers_image, encoded, opened_pipe, pipe_of
from tests.sdxl.together import assert_as_plain_loop, assert_deterministic


def refined(**fields: Any) -> GenerationParams:
    usual = {"width": 96, "height": 128, "steps": 10, "seed": 7, "cache_interval": 1}
    return GenerationParams(PROMPT, **{**usual, "refiner": "small", **fields})


@pytest.fixture(scope="module")
def model(mini: Pipeline, small_refiner: Path) -> Pipeline:
    checkpoint = find_refiner(str(small_refiner))
    refiner = Refiner(checkpoint, load_torch(checkpoint, device="cpu"))
    return Pipeline(mini.checkpoint, mini.engines, mini.catalogue, refiner=refiner)


@pytest.fixture(scope="module")
def pipes(diffusers_mini: Any, small_refiner: Path) -> Any:
    return diffusers_mini, opened_pipe("Img2Img", small_refiner)


def theirs(pipes: Any, params: GenerationParams, **more: Any) -> Tensor:
    """`more`: further arguments of the first pipeline."""
    (first, second), at = pipes, params.refiner_switch_at
    latents = diffusers_image(first, params, "latent", denoising_end=at, **more)
    return diffusers_image(second, params, image=latents[None], denoising_start=at)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"scheduler": "dpmpp_2m", "steps": 12, "refiner_switch_at": 0.6},
        {"scheduler": "ddim", "negative_prompt": "a red ring"},
        {"scheduler": "dpmpp_2m_karras", "steps": 9},
        {"guidance": 1.0, "refiner_switch_at": 0.5},
    ],
    ids=["euler", "dpmpp_2m", "ddim", "karras", "unguided"],
)
def test_refined_pictures_equal_diffusers(model: Pipeline, pipes: Any, fields: Any) -> None:
    (result,) = model.generate([refined(**fields)])
    assert_picture(result, theirs(pipes, result.params))


def test_refined_edits_equal_diffusers(model: Pipeline, pipes: Any) -> None:
    asked = edit(refined(strength=0.7))
    (result,) = model.generate([asked])
    base, second = pipes
    both, source = (pipe_of("Img2Img", base), second), encoded(base, asked.source.image)
    needed = theirs(both, result.params, image=source, strength=result.params.strength)
    assert_picture(result, needed)


@pytest.mark.parametrize("scheduler", ["euler", "dpmpp_2m", "ddim"])
def test_interval_2_equals_a_plain_loop(model: Pipeline, scheduler: str) -> None:
    asked = refined(scheduler=scheduler, cache_interval=2, refiner_switch_at=0.5, steps=11)
    assert_as_plain_loop(model, [WithPictures(asked)])


def test_each_model_begins_with_a_deep_step(model: Pipeline) -> None:
    params = model.resolve(refined(cache_interval=2, refiner_switch_at=0.5, steps=11))
    plan = model.plan(params)
    switch = plan.refined_from
    assert switch == 5
    assert [step.is_deep for step in plan[switch:]] == [True, False] * 3
    kept = model.plan(replace(params, deep_steps=(0, 3)))
    assert [number for number, step in enumerate(kept) if step.is_deep] == [0, 3, 5]


MIXED = [
    refined(cache_interval=2),
    GenerationParams("a red circle", width=96, height=128, steps=10, seed=1),
    refined(seed=3, cache_interval=3, refiner_switch_at=0.4, guidance=1.0),
    GenerationParams("a ring", width=96, height=128, steps=7, seed=2, scheduler="dpmpp_2m"),
    refined(seed=4, scheduler="euler_a", steps=13),
    refined(seed=5, upscale=1.5, cache_interval=2),
]


def test_pictures_are_as_alone(model: Pipeline) -> None:
    assert_as_alone(model, model.generate(MIXED), MIXED)


@pytest.mark.parametrize(
    "added",
    [{"loras": (Lora("outlined"),)}, {"controls": (Control("edges", "a"),)}],
    ids=["LoRA", "ControlNet"],
)
def test_what_a_request_adds_acts_until_the_refiner_takes_over(
    model: Pipeline, added: dict[str, Any]
) -> None:
    maps = {"a": file_of(drawing(96, 128))}
    made = [
        WithPictures(refined(refiner_switch_at=at, cache_interval=2, **fields), maps=maps)
        for at in (0.0, 0.5)
        for fields in ({}, added)
    ]
    plain, same, half, other = images_of(model, *made)
    assert psnr(plain, same) >= 60 and psnr(half, other) < 40


@pytest.mark.slow
def test_bytes_do_not_depend_on_neighbours(model: Pipeline) -> None:
    assert_deterministic(model, MIXED)


def test_plain_pictures_do_not_depend_on_a_loaded_refiner(mini: Pipeline, model: Pipeline) -> None:
    one = GenerationParams(PROMPT, steps=4, seed=3)
    (found,), (expected,) = images_of(model, one), images_of(mini, one)
    assert torch.equal(found, expected)


def test_a_refiner_that_is_not_loaded_is_refused(mini: Pipeline, model: Pipeline) -> None:
    with pytest.raises(InvalidParams, match="no refiner is loaded"):
        mini.check(refined())
    with pytest.raises(InvalidParams, match="refiner must be small, got 'other'"):
        model.check(refined(refiner="other"))
    with pytest.raises(InvalidParams, match="refiner_switch_at needs refiner"):
        GenerationParams(refiner_switch_at=0.5)
