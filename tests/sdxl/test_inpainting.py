"""Checkpoints made for inpainting, whose UNet reads a mask and the picture under it, against
diffusers' own pipeline on the same folder."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch import Tensor

from sdxl.checkpoint import CheckpointError, find
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline
from tests.conftest import assert_as_alone, assert_picture
from tests.sdxl.altered import write_inpainting
from tests.sdxl.flights import launched_groups
from tests.sdxl.test_editing import STRENGTHS_AND_GUIDANCE, Edit, edit, params_of
from tests.sdxl.test_pipeline import SIZES, assert_as_substituted
from tests.sdxl.their_schedulers import (
    EACH_KIND,
    FEW,
    diffusers_image,
    each_at,
    encoded,
    opened_pipe,
)

HOLE = (13, 27, 75, 90)
"""Its edges lie within latents: one pixel of each latent decides whether the latent is masked."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inpainting(tmp_path_factory.mktemp("models") / "sdxl-inpainting")


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Any:
    return opened_pipe("Inpaint", folder)


def hole(size: tuple[int, int]) -> Image.Image:
    """Return a mask that is soft at one side."""
    mask = Image.new("L", size, 0)
    mask.paste(255, HOLE)
    mask.paste(100, (HOLE[2], HOLE[1], HOLE[2] + 6, HOLE[3]))
    mask.paste(140, (HOLE[2] + 6, HOLE[1], HOLE[2] + 15, HOLE[3]))
    return mask


def theirs(pipe: Any, asked: Edit | GenerationParams, output_type: str = "pt") -> Tensor:
    """Without a mask, everything is masked."""
    params = asked.params if isinstance(asked, Edit) else asked
    assert params.width and params.height
    size = params.width, params.height
    picture, mask = Image.new("RGB", size), Image.new("L", size, 255)
    if isinstance(asked, Edit):
        picture, mask = asked.source.image, asked.source.mask or mask
    strength = 1.0 if params.strength is None else params.strength
    more: dict[str, Any] = {"image": picture, "mask_image": mask, "strength": strength}
    if params.encoding != "sample":
        more |= {
            "image": encoded(pipe, picture),
            "masked_image_latents": encoded(pipe, picture, hidden=mask),
        }
    return diffusers_image(pipe, params, output_type, **more)


def compare(model: Pipeline, pipe: Any, *asked: Edit | GenerationParams) -> None:
    for result, each in zip(model.generate(asked), asked, strict=True):
        assert_picture(result, theirs(pipe, each))


@pytest.mark.parametrize(("scheduler", "size"), each_at(SIZES))
def test_inpainting_equals_diffusers(
    model: Pipeline, pipe: Any, scheduler: str, size: tuple[int, int]
) -> None:
    """All strengths, with and without guidance, are in flight together."""
    params = (
        params_of(scheduler, size, strength, guidance=guidance)
        for strength, guidance in STRENGTHS_AND_GUIDANCE
    )
    compare(model, pipe, *(edit(each, mask=hole(size)) for each in params))


@pytest.mark.parametrize("size", SIZES)
def test_without_a_mask_everything_is_masked(
    model: Pipeline, pipe: Any, size: tuple[int, int]
) -> None:
    """Pictures from text, which diffusers inpaints at full strength, and from another picture."""
    from_text = replace(params_of("euler", size, 1.0, steps=5), strength=None)
    compare(model, pipe, from_text, edit(params_of("dpmpp_2m", size, 0.6, steps=5)))


def test_random_numbers_are_drawn_in_the_order_of_diffusers(model: Pipeline, pipe: Any) -> None:
    size = SIZES[1]
    params = (params_of("euler_a", size, s, steps=5, encoding="sample") for s in (0.6, 1.0))
    compare(model, pipe, *(edit(each, mask=hole(size)) for each in params))


@pytest.mark.parametrize("scheduler", EACH_KIND)
def test_interval_2_equals_the_full_unet_with_tensors_substituted(
    model: Pipeline, pipe: Any, scheduler: str
) -> None:
    size, usual = SIZES[1], {"steps": 8 if scheduler in FEW else 20, "cache_interval": 2}
    asked = [
        edit(params_of(scheduler, size, strength, **usual), mask=hole(size))
        for strength in (0.65, 1.0)
    ]
    assert_as_substituted(model, pipe.unet, asked, partial(theirs, pipe))


def test_all_kinds_share_calls_and_equal_those_made_alone(model: Pipeline) -> None:
    size = SIZES[0]
    usual = {"steps": 6, "guidance": 5.0, "cache_interval": 2}
    text = replace(params_of("euler", size, 1.0, **usual), strength=None)
    asked = [
        text,
        edit(params_of("ddim", size, 0.5, **usual)),
        edit(params_of("euler_a", size, 1.0, **usual), mask=hole(size)),
        edit(params_of("euler", size, 0.7, **usual, guided_steps=(0, 1, 3)), mask=hole(size)),
        replace(text, scheduler="dpmpp_2m", seed=4, upscale=1.25),
        replace(text, seed=5, upscale=1.25, upscaler="latent", upscale_strength=0.7),
    ]
    with launched_groups() as groups:
        together = model.generate(asked)
    assert max(len(group.ids) for group in groups) == len(asked)
    assert_as_alone(model, together, asked)


def test_another_number_of_input_channels_is_refused(tmp_path: Path) -> None:
    eight = find(str(write_inpainting(tmp_path / "eight", channels=8)))
    with pytest.raises(
        CheckpointError, match="4 channels besides the 4 latents; expected none, or"
    ):
        assert eight.arch
