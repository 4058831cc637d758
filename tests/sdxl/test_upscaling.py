"""Pictures upscaled by a second leg, against diffusers' two pipelines one after the other, and
among others in flight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from sdxl.params import GenerationParams, InvalidParams, Sizes
from sdxl.pipeline import Pipeline
from sdxl.work import standard_images
from tests.conftest import assert_picture
from tests.sdxl.test_editing import edit, params_of
from tests.sdxl.test_pipeline import PROMPT
from tests.sdxl.their_schedulers import diffusers_image, encoded, pipe_of

SIZES = Sizes(128, 64, 256)


def upscaled(**fields: Any) -> GenerationParams:
    usual = {"width": 96, "height": 128, "steps": 5, "seed": 7, "cache_interval": 1}
    return GenerationParams(PROMPT, **{**usual, "upscale": 1.5, **fields})


@pytest.fixture(scope="module")
def pipes(diffusers_mini: Any) -> Any:
    """Make diffusers' text to image and image to image pipelines from the same networks."""
    return diffusers_mini, pipe_of("Img2Img", diffusers_mini)


def theirs(pipes: Any, params: GenerationParams) -> Tensor:
    """Each pipeline draws new noise."""
    first, second = pipes
    is_latent = params.upscaler == "latent"
    width, height = params.result_size
    found: Any = diffusers_image(first, params, "latent" if is_latent else "pil")
    if is_latent:
        latents = interpolate(found[None], (height // 8, width // 8), mode="bilinear")
    else:
        latents = encoded(second, found.resize((width, height), Image.Resampling.LANCZOS))
    again = replace(params, steps=params.upscale_steps or params.steps)
    return diffusers_image(second, again, image=latents, strength=params.upscale_strength)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"upscaler": "latent", "upscale_strength": 0.8},
        {"scheduler": "dpmpp_2m", "upscale_steps": 9, "upscale": 2.0, "height": 80},
        {"scheduler": "euler_a", "guidance": 1.0},
    ],
    ids=["lanczos", "latent", "other steps", "noisy"],
)
def test_upscaled_pictures_equal_diffusers(mini: Pipeline, pipes: Any, fields: Any) -> None:
    (result,) = mini.generate([upscaled(**fields)])
    assert_picture(result, theirs(pipes, result.params))
    assert result.image is not None and result.image.shape[1:] == result.params.result_size[::-1]


def test_an_edit_is_upscaled_as_a_picture_from_text_is(mini: Pipeline) -> None:
    """An edit with a strength has two legs; without one its image begins at the larger size."""
    plain = edit(params_of("euler", (128, 128), 0.5))
    both = replace(plain, params=replace(plain.params, upscale=1.5))
    (result,) = mini.generate([both])
    assert result.image is not None and result.image.shape[1:] == (192, 192)
    assert (result.deep_steps, result.shallow_steps) == (5 + 4, 0)
    alone = upscaled(steps=10).for_edit(has_mask=False)
    assert (alone.width, alone.height, alone.strength, alone.upscale) == (144, 192, 0.4, None)


def test_the_second_leg_follows_the_first_one_s_parameters() -> None:
    asked = upscaled(steps=10, deep_steps=(0, 4), guided_steps=(0, 1), cache_interval=3)
    first, then = asked.legs
    assert (first.deep_steps, first.guided_steps, first.upscale) == ((0, 4), (0, 1), None)
    assert (then.deep_steps, then.guided_steps, then.cache_interval) == (None, None, 3)
    assert (then.width, then.height, then.taken_steps) == (144, 192, 4)
    assert asked.all_steps == 14
    assert GenerationParams(upscale=1.0).legs == (GenerationParams(upscale=1.0),)


def test_both_legs_count_as_work() -> None:
    """The second leg is 1.5 times as wide and as high, and takes two fifths of the steps."""
    one, both = standard_images(upscaled(upscale=None), SIZES), standard_images(upscaled(), SIZES)
    assert both == pytest.approx(one * (1 + 1.5**2 * 0.4))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"upscale": 2.5}, r"up to 256 \(96x128 becomes 240x320\), got 2.5"),
        ({"upscale": 0.5}, "upscale must be a number from 1 to 4.0, got 0.5"),
        ({"upscaler": "esrgan"}, "upscaler must be one of lanczos, latent, got 'esrgan'"),
        (
            {"upscale_strength": 0.1},
            "upscale_strength must be at least 0.2 with 5 steps, to take one, got 0.1",
        ),
        ({"upscale": None, "upscaler": "latent"}, "upscaler needs upscale above 1"),
    ],
)
def test_what_cannot_be_upscaled_is_refused_by_name(fields: Any, words: str) -> None:
    with pytest.raises(InvalidParams, match=words):
        upscaled(**fields).resolve(SIZES, lambda: 0)


@pytest.mark.parametrize("name", ["deep_steps", "guided_steps"])
def test_an_image_that_is_only_upscaled_has_no_first_leg_to_number_steps_of(name: str) -> None:
    asked = upscaled(**{name: (0, 2)})
    with pytest.raises(InvalidParams, match=f"{name} cannot be set .*a strength"):
        asked.for_edit(has_mask=False)
    assert getattr(replace(asked, strength=1.0).for_edit(has_mask=False), name) == (0, 2)


def test_a_masked_picture_is_upscaled_by_itself() -> None:
    with pytest.raises(
        InvalidParams, match="upscale cannot be used with a mask; upscale the result in a"
    ):
        upscaled(strength=0.5).for_edit(has_mask=True)
