"""Pictures made from other pictures, against diffusers' own pipelines on the same folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from sdxl.images import pasted, to_pixels
from sdxl.params import GenerationParams, InvalidParams
from sdxl.picture_files import file_of
from sdxl.pipeline import Pipeline, WithPictures
from sdxl.source import GivenImage, SourceImage
from tests.conftest import assert_as_alone, assert_picture, images_of
from tests.sdxl.flights import launched_groups
from tests.sdxl.test_pipeline import PROMPT, SIZES, assert_as_substituted
from tests.sdxl.their_schedulers import (
    EACH_KIND,
    FEW,
    diffusers_image,
    each_at,
    encoded,
    pipe_of,
)

STRENGTHS_AND_GUIDANCE = ((0.1, 5.0), (0.5, 1.0), (0.8, 5.0), (1.0, 1.0))
HOLE = (16, 24, 72, 88)
"""the hole's edges are those of latents, so averaging pixels equals diffusers' choice of pixels"""


def drawing(width: int, height: int) -> Image.Image:
    picture = Image.new("RGB", (width, height), (30, 60, 200))
    draw = ImageDraw.Draw(picture)
    draw.ellipse((20, 20, 80, 80), (250, 220, 40))
    draw.rectangle((60, 50, width - 10, height - 8), (20, 160, 60))
    return picture


def masking(width: int, height: int) -> Image.Image:
    mask = Image.new("L", (width, height), 0)
    mask.paste(255, HOLE)
    return mask


@dataclass(frozen=True)
class Edit(WithPictures):
    """A request with the image that it edits."""

    source: SourceImage


def edit(
    params: GenerationParams, *, is_masked: bool = False, mask: Image.Image | None = None
) -> Edit:
    assert params.width and params.height
    size = params.width, params.height
    mask = masking(*size) if is_masked else mask
    given = GivenImage.read(file_of(drawing(*size)), file_of(mask) if mask else None)
    params = params.for_edit(has_mask=mask is not None)
    return Edit(params, given.source(params))


@pytest.fixture(scope="module")
def pipes(diffusers_mini: Any) -> Any:
    """Make diffusers' image to image and inpainting pipelines from the same networks."""
    return [pipe_of(kind, diffusers_mini) for kind in ("Img2Img", "Inpaint")]


def theirs(pipes: Any, asked: Edit, output_type: str = "pt") -> Tensor:
    params, source = asked.params, asked.source
    pipe = pipes[source.mask is not None]
    image = source.image if params.encoding == "sample" else encoded(pipe, source.image)
    more: dict[str, Any] = {"image": image, "strength": params.strength}
    if source.mask is not None:
        more["mask_image"] = source.mask
    return diffusers_image(pipe, params, output_type, **more)


def compare(mini: Pipeline, pipes: Any, asked: list[Edit]) -> None:
    for result, each in zip(mini.generate(asked), asked, strict=True):
        assert_picture(result, theirs(pipes, each))


def params_of(scheduler: str, size: tuple[int, int], strength: float, **rest: Any) -> Any:
    width, height = size
    usual = {"steps": 10, "seed": 7, "cache_interval": 1} | rest
    return GenerationParams(
        PROMPT, width=width, height=height, strength=strength, scheduler=scheduler, **usual
    )


@pytest.mark.parametrize("is_masked", [False, True], ids=["image", "mask"])
@pytest.mark.parametrize(("scheduler", "size"), each_at(SIZES))
def test_edits_of_every_strength_equal_diffusers(
    mini: Pipeline, pipes: Any, scheduler: str, size: tuple[int, int], is_masked: bool
) -> None:
    """Edits with and without guidance are in flight together."""
    asked = [
        edit(params_of(scheduler, size, strength, guidance=guidance), is_masked=is_masked)
        for strength, guidance in STRENGTHS_AND_GUIDANCE
    ]
    compare(mini, pipes, asked)


@pytest.mark.parametrize("side", [107, 131])
def test_a_picture_of_any_size_is_resized_as_by_diffusers(
    mini: Pipeline, pipes: Any, side: int
) -> None:
    """diffusers gets the whole picture and resizes it to the next lower multiples of 8."""
    size = 8 * (side // 8), 8 * (side * 2 // 8)
    given = GivenImage.read(file_of(drawing(side, side * 2)))
    for encoding in ("sample", "mean"):
        params = params_of("euler", size, 0.6, steps=5, encoding=encoding).for_edit(has_mask=False)
        source = given.source(params)
        assert source.size == size
        whole = replace(source, image=given.picture)
        (result,) = mini.generate([Edit(params, source)])
        assert_picture(result, theirs(pipes, Edit(params, whole)))


@pytest.mark.parametrize("is_masked", [False, True], ids=["image", "mask"])
@pytest.mark.parametrize("scheduler", EACH_KIND)
def test_interval_2_equals_the_full_unet_with_tensors_substituted(
    mini: Pipeline, pipes: Any, scheduler: str, is_masked: bool
) -> None:
    """Deep steps are counted from the edit's first step."""
    usual = {"steps": 8 if scheduler in FEW else 20, "cache_interval": 2}
    asked = [
        edit(params_of(scheduler, SIZES[1], strength, **usual), is_masked=is_masked)
        for strength in (0.65, 1.0)
    ]
    assert_as_substituted(mini, pipes[is_masked].unet, asked, partial(theirs, pipes))


def test_latents_are_sampled_as_by_diffusers(mini: Pipeline, pipes: Any) -> None:
    params = params_of("euler", SIZES[1], 0.6, steps=5, encoding="sample")
    compare(mini, pipes, [edit(params), edit(params, is_masked=True)])


def test_a_hidden_picture_leaves_no_trace_at_full_strength(mini: Pipeline) -> None:
    """This holds under a mask, as in diffusers. Without a mask the start shows the picture."""
    plain = params_of("euler", SIZES[0], 1.0, steps=2)
    (one, other) = (
        Edit(plain, GivenImage.read(file_of(Image.new("RGB", SIZES[0], colour))).source(plain))
        for colour in ("red", "blue")
    )
    assert not torch.equal(*images_of(mini, one, other))
    everywhere = Image.new("L", SIZES[0], 255)
    masked = [replace(each, source=replace(each.source, mask=everywhere)) for each in (one, other)]
    assert torch.equal(*images_of(mini, *masked))


def test_unmasked_pixels_equal_the_source_to_the_byte(mini: Pipeline) -> None:
    """The mask is soft, or its region is enlarged."""
    size = (200, 152)
    for rest in ({"mask_blur": 4}, {"mask_padding": 16}, {}):
        given = GivenImage.read(file_of(drawing(*size)), file_of(masking(*size)))
        params = params_of("euler", (128, 128), 1.0, steps=2, **rest)
        if "mask_padding" not in rest:
            params = replace(params, width=size[0], height=size[1])
        source = given.source(params)
        (result,) = mini.generate([Edit(params, source)])
        assert result.image is not None and source.mask is not None
        made = pasted(to_pixels(result.image), source)
        mask = source.mask
        if source.whole is not None:
            whole = source.whole.decoded()
            mask = Image.new("L", size, 0)
            mask.paste(whole.mask, whole.box[:2])
        kept = np.asarray(mask) == 0
        assert made.shape == (size[1], size[0], 3) and kept.mean() > 0.4
        assert np.array_equal(made[kept], np.asarray(drawing(*size))[kept])
        assert not np.array_equal(made, np.asarray(drawing(*size)))


def test_edits_and_pictures_from_text_share_calls(mini: Pipeline) -> None:
    """Requests of one size share all calls, so the calls are as many as the longest request's
    steps, and each picture equals the same picture made alone."""
    usual: dict[str, Any] = {"steps": 6, "guidance": 5.0, "cache_interval": 2}
    text = GenerationParams(PROMPT, seed=3, width=128, height=128, **usual)
    asked: list[GenerationParams | Edit] = [
        text,
        edit(params_of("ddim", SIZES[0], 0.5, **usual)),
        edit(params_of("euler_a", SIZES[0], 0.7, **usual), is_masked=True),
        replace(text, scheduler="dpmpp_2m", seed=4),
    ]
    with launched_groups() as groups:
        together = mini.generate(asked)
    sizes = [len(group.ids) for group in groups]
    assert sum(sizes) == 6 + 3 + 4 + 6 and max(sizes) == 4, sizes
    assert_as_alone(mini, together, asked)


def test_pictures_in_the_same_call_as_an_inpainting_are_unchanged(mini: Pipeline) -> None:
    """A picture from text has the same bits beside an inpainting, in calls of one shape."""
    exact = replace(mini, is_deterministic=True)
    text = GenerationParams(PROMPT, steps=4, cache_interval=2, seed=3, width=128, height=128)
    masked = edit(params_of("euler", SIZES[0], 1.0, steps=4), is_masked=True)
    (alone,), (beside, _) = images_of(exact, text), images_of(exact, text, masked)
    assert torch.equal(alone, beside)


def test_engines_without_the_encoder_refuse_what_is_encoded(mini: Pipeline) -> None:
    known = {n: e for n, e in mini.engines.by_name.items() if n != "vae_encoder"}
    older = replace(mini, engines=replace(mini.engines, by_name=known))
    assert mini.can_edit and not older.can_edit
    upscaled = GenerationParams(PROMPT, upscale=1.5)
    for plain in (GenerationParams(PROMPT), replace(upscaled, upscaler="latent")):
        older.check(plain)
    for asked, message in (
        (params_of("euler", SIZES[0], 0.5), r"image needs engines with vae_encoder \(run sdxl"),
        (upscaled, "upscale needs engines with vae_encoder .*; or upscaler latent"),
    ):
        with pytest.raises(InvalidParams, match=message):
            older.check(asked)


def test_strength_without_an_image_is_refused(mini: Pipeline) -> None:
    with pytest.raises(InvalidParams, match="strength needs an image to edit"):
        mini.generate([GenerationParams(PROMPT, strength=0.5)])
