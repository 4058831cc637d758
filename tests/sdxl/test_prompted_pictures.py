"""Pictures with image prompts, against diffusers' pipelines and among others in flight."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from engines import load
from sdxl.attachments import Lora
from sdxl.catalogue import Catalogue
from sdxl.controls import Control
from sdxl.image_inputs import pixels_of
from sdxl.image_prompts import ImagePrompt
from sdxl.params import GenerationParams, InvalidParams
from sdxl.picture_files import file_of
from sdxl.pipeline import Pipeline, WithPictures
from sdxl.places import LORAS
from tests.conftest import assert_as_alone, assert_picture, images_of, psnr
from tests.sdxl.control_nets import random_control
from tests.sdxl.flights import launched_groups
from tests.sdxl.image_adapters import PLAIN, PLUS, SIDE, write_adapters
from tests.sdxl.test_editing import edit, params_of
from tests.sdxl.their_schedulers import diffusers_image, pipe_of
from tests.sdxl.together import (
    assert_as_plain_loop,
    assert_deterministic,
    assert_edit_as_diffusers,
    assert_rides,
)

SIZE = (128, 96)
PROCESSOR = CLIPImageProcessorPil(
    size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
)
ONE, OTHER = ImagePrompt(PLAIN, "a"), ImagePrompt(PLUS, "b")


def picture_of(seed: int, width: int = SIDE, height: int = SIDE) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST)


PICTURES = {"a": picture_of(1), "b": picture_of(2), "map": picture_of(3, *SIZE)}
FILES = {name: file_of(each) for name, each in PICTURES.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapters(tmp_path_factory.mktemp("ip_adapters"))


@pytest.fixture(scope="module")
def net() -> Any:
    return random_control(1)


@pytest.fixture(scope="module")
def model(mini: Pipeline, net: Any, folder: Path, tmp_path_factory: Any) -> Pipeline:
    nets: Path = tmp_path_factory.mktemp("controlnets")
    net.save_pretrained(nets / "net")
    return replace(mini, catalogue=Catalogue([LORAS], [nets], [folder]))


def asked(*prompts: ImagePrompt, **fields: Any) -> WithPictures:
    usual = {"width": SIZE[0], "height": SIZE[1], "steps": 4, "seed": 7, "cache_interval": 1}
    params = GenerationParams("a red circle", **{**usual, **fields}, image_prompts=prompts or None)
    return WithPictures(params, maps=FILES)


def their_pipe(base: Any, folder: Path, names: Sequence[str], kind: str = "", **more: Any) -> Any:
    """diffusers' pipeline with these adapters, on a copy of the UNet, which loading changes."""
    unet = copy.deepcopy(base.unet)
    pipe = pipe_of(kind, base, unet=unet, feature_extractor=PROCESSOR, **more)
    weights = [f"{name}.safetensors" for name in names]
    pipe.load_ip_adapter(str(folder), subfolder="", weight_name=weights, low_cpu_mem_usage=False)
    return pipe


def theirs(
    pipe: Any, params: GenerationParams, pictures: list[Any], scale: Any, **more: Any
) -> Tensor:
    pipe.set_ip_adapter_scale(scale)
    return diffusers_image(pipe, params, ip_adapter_image=pictures, **more)


def their_scale(prompt: ImagePrompt) -> Any:
    """Return the strength, or with a mode the strengths of the layers that attend."""
    modes: dict[str, Any] = {
        "style": {"up": {"block_0": [0.0, prompt.strength, 0.0]}},
        "composition": {"down": {"block_2": [0.0, prompt.strength]}},
    }
    return modes.get(prompt.mode, prompt.strength)


@pytest.mark.parametrize(
    ("prompts", "guidance"),
    [
        ([ONE], 1.0),
        ([replace(ONE, strength=0.4)], 5.0),
        ([replace(OTHER, strength=0.8)], 5.0),
        ([ONE, replace(ONE, image="b")], 5.0),
        ([replace(OTHER, strength=0.5), replace(OTHER, image="a", strength=0.5)], 1.0),
        ([replace(ONE, strength=0.5), replace(OTHER, strength=0.8)], 5.0),
        ([replace(ONE, strength=0.7, mode="style")], 5.0),
        ([replace(OTHER, strength=2.0, mode="composition")], 1.0),
    ],
    ids=["plain", "weak", "plus", "two pictures", "two of plus", "two", "style", "composition"],
)
def test_pictures_equal_diffusers(
    model: Pipeline,
    folder: Path,
    diffusers_mini: Any,
    prompts: list[ImagePrompt],
    guidance: float,
) -> None:
    given = asked(*prompts, guidance=guidance)
    plain, result = model.generate([asked(guidance=guidance), given])
    of_adapters = {each.name: [p for p in prompts if p.name == each.name] for each in prompts}
    pipe = their_pipe(diffusers_mini, folder, [*of_adapters])
    shown = [[PICTURES[each.image] for each in own] for own in of_adapters.values()]
    scales = [their_scale(first) for first, *_ in of_adapters.values()]
    assert_picture(result, theirs(pipe, given.params, shown, scales))
    assert plain.image is not None and result.image is not None
    assert psnr(result.image, plain.image) < 50, "the image prompt changes the picture"


def test_with_a_controlnet_they_equal_diffusers(
    model: Pipeline, folder: Path, diffusers_mini: Any, net: Any
) -> None:
    given = asked(ONE, controls=(Control("net", "map", strength=0.7),))
    (result,) = model.generate([given])
    pipe = their_pipe(diffusers_mini, folder, [PLAIN], "ControlNet", controlnet=net)
    more = {"image": PICTURES["map"], "controlnet_conditioning_scale": 0.7}
    assert_picture(result, theirs(pipe, given.params, [PICTURES["a"]], 1.0, **more))


@pytest.mark.parametrize("is_masked", [False, True], ids=["image", "mask"])
def test_edits_equal_diffusers(
    model: Pipeline, folder: Path, diffusers_mini: Any, is_masked: bool
) -> None:
    given = edit(params_of("euler", SIZE, 0.6, image_prompts=(OTHER,)), is_masked=is_masked)
    pipe = their_pipe(diffusers_mini, folder, [PLUS], "Inpaint" if is_masked else "Img2Img")
    shown = [PICTURES["b"]]
    assert_edit_as_diffusers(model, given, FILES, partial(theirs, pipe, given.params, shown, 1.0))


MIXED = (
    asked(),
    asked(ONE, cache_interval=2),
    asked(replace(ONE, strength=0.5, start=0.2, end=0.8), seed=3, cache_interval=3),
    asked(ONE, OTHER, guidance=1.0, cache_interval=2),
    asked(replace(OTHER, end=0.5), ONE, seed=5, cache_interval=2, guidance_interval=(0, 0.6)),
    asked(ONE, replace(ONE, image="b", strength=0.4), cache_interval=2, loras=(Lora("outlined"),)),
    asked(OTHER, cache_interval=2, controls=(Control("net", "map"),), loras=(Lora("hollow"),)),
    asked(cache_interval=2, upscale=1.5),
    asked(OTHER, cache_interval=2, upscale=1.5),
)


def test_cached_pictures_equal_a_plain_loop(model: Pipeline) -> None:
    assert_as_plain_loop(model, MIXED[1:5])


def test_pictures_in_flight_equal_those_alone(model: Pipeline) -> None:
    assert_as_alone(model, model.generate(MIXED), MIXED)


@pytest.mark.slow
def test_a_deterministic_picture_has_the_bytes_that_it_has_alone(model: Pipeline) -> None:
    assert_deterministic(model, MIXED)


def test_rows_with_and_without_image_prompts_may_share_calls(model: Pipeline) -> None:
    """Exactly 0 is added to rows without image prompts."""
    assert_rides(model, MIXED[:5])


def test_steps_outside_the_window_run_the_plain_network(model: Pipeline) -> None:
    with launched_groups() as groups:
        model.generate([asked(replace(ONE, start=0.5)), asked(replace(OTHER, start=0.5))])
    first, *others = [group for group in groups if group.network == "unet_deep"]
    assert first.call.variant.images == 0 and len(first.ids) == 2, "they share a plain call"
    assert {each.call.variant.image_tokens for each in others} == {0, 4, 16}


def test_strength_0_is_the_plain_picture(model: Pipeline) -> None:
    plain, prompted = images_of(model, asked(), asked(replace(ONE, strength=0.0)))
    assert torch.equal(plain, prompted)


@pytest.mark.parametrize("size", [(64, 48), (33, 71), (20, 20), (32, 32)])
def test_pictures_are_read_as_by_clip(size: tuple[int, int]) -> None:
    picture = picture_of(4, *size)
    expected = PROCESSOR(picture, return_tensors="pt").pixel_values
    torch.testing.assert_close(pixels_of(file_of(picture), SIDE), expected)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            ImagePrompt("ip-adapter", "a"),
            f"image_prompts must name IP-Adapters of the model, such as {PLAIN}",
        ),
        (ImagePrompt(PLAIN), f"image_prompts with {PLAIN!r}: needs its picture"),
        (ImagePrompt(PLAIN, "broken"), f"image_prompts with {PLAIN!r}: its picture must be a PNG"),
    ],
)
def test_wrong_image_prompts_are_refused(
    model: Pipeline, prompt: ImagePrompt, message: str
) -> None:
    (result,) = model.generate([replace(asked(prompt), maps=FILES | {"broken": b"no picture"})])
    assert isinstance(result.error, InvalidParams)
    assert str(result.error).startswith(message)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"most_images": 1}, "must have at most 1 adapters, modes and step ranges for these"),
        ({"most_image_tokens": 16}, "must have at most 16 tokens together for these engines, got"),
    ],
)
def test_more_image_prompts_than_the_engines_take_are_refused(
    model: Pipeline, limits: dict[str, Any], message: str
) -> None:
    built = replace(model, engines=replace(model.engines, **limits))
    fits, (result,) = (built.generate([asked(*each)]) for each in ((ONE,), (ONE, OTHER, OTHER)))
    assert fits[0].error is None
    assert isinstance(result.error, InvalidParams) and message in str(result.error)


def test_a_picture_of_several_requests_is_encoded_once(model: Pipeline) -> None:
    (adapter,) = model.adapters(model.uses(asked(ONE).params)).image_adapters.values()
    assert adapter.encode(FILES["a"]) is adapter.encode(FILES["a"])


@pytest.mark.slow
def test_onnxruntime_makes_the_same_pictures(model: Pipeline) -> None:
    """Also with LoRAs and ControlNets."""
    ours = replace(model, engines=load("mini", "onnxruntime").engines)
    for found, expected in zip(ours.generate(MIXED), images_of(model, *MIXED), strict=True):
        assert_picture(found, expected.clamp(-1, 1))
