"""Pictures with ControlNets, against diffusers' pipelines and among others in flight."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sdxl.adapters import NoRoom
from sdxl.catalogue import Catalogue
from sdxl.control_inputs import maps_of
from sdxl.controls import TYPES, Control
from sdxl.params import GenerationParams, InvalidParams
from sdxl.picture_files import file_of
from sdxl.pipeline import Pipeline, WithPictures
from sdxl.source import GivenImage
from tests.conftest import assert_as_alone, assert_picture, images_of
from tests.sdxl.control_nets import random_control, random_union
from tests.sdxl.flights import launched_groups
from tests.sdxl.test_editing import drawing, edit, params_of
from tests.sdxl.their_schedulers import diffusers_image, pipe_of
from tests.sdxl.together import (
    assert_as_plain_loop,
    assert_deterministic,
    assert_edit_as_diffusers,
    assert_rides,
)

SIZE = (128, 96)
FIRST, SECOND, UNION = Control("first", "a"), Control("second", "b"), Control("union", "a")


def map_of(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*SIZE[::-1], 3), np.uint8))


MAPS = {"a": map_of(1), "b": map_of(2)}
FILES = {name: file_of(each) for name, each in MAPS.items()}


@pytest.fixture(scope="module")
def nets() -> dict[str, Any]:
    return {"first": random_control(1), "second": random_control(2), "union": random_union(3)}


@pytest.fixture(scope="module")
def model(mini: Pipeline, nets: dict[str, Any], tmp_path_factory: Any) -> Pipeline:
    folder: Path = tmp_path_factory.mktemp("controlnets")
    for name, net in nets.items():
        net.save_pretrained(folder / name)
    return replace(mini, catalogue=Catalogue(control_folders=[folder]))


def asked(*controls: Control, **fields: Any) -> WithPictures:
    usual = {"width": SIZE[0], "height": SIZE[1], "steps": 4, "seed": 7, "cache_interval": 1}
    params = GenerationParams("a red circle", **{**usual, **fields}, controls=controls or None)
    return WithPictures(params, maps=FILES)


def theirs(pipe: Any, given: WithPictures, **more: Any) -> Tensor:
    controls = given.params.controls or ()
    each: dict[str, Any] = {
        "control_image" if "image" in more else "image": [MAPS[c.image] for c in controls],
        "controlnet_conditioning_scale": [c.strength for c in controls],
        "control_guidance_start": [c.start for c in controls],
        "control_guidance_end": [c.end for c in controls],
    }
    if len(controls) == 1:
        each = {name: values[0] for name, values in each.items()}
    is_guess = controls[0].mode == "guess"
    return diffusers_image(pipe, given.params, guess_mode=is_guess, **each, **more)


@pytest.mark.parametrize(
    "controls",
    [
        (FIRST,),
        (replace(FIRST, strength=0.6, start=0.2, end=0.7),),
        (replace(FIRST, mode="guess"),),
        (FIRST, replace(SECOND, strength=0.7, end=0.5)),
    ],
    ids=["one", "window", "guess", "two"],
)
@pytest.mark.parametrize("guidance", [5.0, 1.0])
def test_pictures_equal_diffusers(
    model: Pipeline,
    nets: dict[str, Any],
    diffusers_mini: Any,
    controls: tuple[Control, ...],
    guidance: float,
) -> None:
    given = asked(*controls, guidance=guidance)
    (result,) = model.generate([given])
    used = [nets[each.name] for each in controls]
    net = used if len(used) > 1 else used[0]
    pipe = pipe_of("ControlNet", diffusers_mini, controlnet=net)
    assert_picture(result, theirs(pipe, given))


@pytest.mark.parametrize("types", [("canny",), ("depth", "openpose")])
def test_unions_equal_diffusers(
    model: Pipeline, nets: dict[str, Any], diffusers_mini: Any, types: tuple[str, ...]
) -> None:
    """The pictures have no guidance, because diffusers' union mixes the rows of a call."""
    maps = zip(types, MAPS, (0.8, 0.5), strict=False)
    union = [Control("union", image, scale, type=each) for each, image, scale in maps]
    (result,) = model.generate([asked(*union, guidance=1.0)])
    expected = diffusers_image(
        pipe_of("ControlNetUnion", diffusers_mini, controlnet=nets["union"]),
        result.params,
        control_image=[MAPS[each.image] for each in union],
        control_mode=[TYPES.index(each) for each in types],
        controlnet_conditioning_scale=[each.strength for each in union],
    )
    assert_picture(result, expected)


@pytest.mark.parametrize("is_masked", [False, True], ids=["image", "mask"])
def test_edits_equal_diffusers(
    model: Pipeline, nets: dict[str, Any], diffusers_mini: Any, is_masked: bool
) -> None:
    params = params_of("euler", SIZE, 0.6, controls=(replace(FIRST, strength=0.8, end=0.7),))
    given = edit(params, is_masked=is_masked)
    kind = f"ControlNet{'Inpaint' if is_masked else 'Img2Img'}"
    pipe = pipe_of(kind, diffusers_mini, controlnet=nets["first"])
    assert_edit_as_diffusers(model, given, FILES, partial(theirs, pipe, given))


MIXED = (
    asked(),
    asked(FIRST, cache_interval=2),
    asked(replace(FIRST, strength=0.5, start=0.2, mode="control"), seed=3, cache_interval=3),
    asked(FIRST, SECOND, guidance=1.0, cache_interval=2),
    asked(replace(SECOND, end=0.5), seed=5, cache_interval=2, guidance_interval=(0, 0.6)),
    asked(FIRST, replace(FIRST, image="b", start=0.3), cache_interval=2),
    asked(replace(UNION, type="canny"), replace(UNION, image="b", type="tile"), cache_interval=2),
    asked(cache_interval=2, upscale=1.5),
    asked(FIRST, cache_interval=2, upscale=1.5),
)


def test_cached_pictures_equal_a_plain_loop(model: Pipeline) -> None:
    assert_as_plain_loop(model, MIXED[1:7])


def test_pictures_in_flight_equal_those_alone(model: Pipeline) -> None:
    with launched_groups() as groups:
        made = model.generate(MIXED)
    assert_as_alone(model, made, MIXED)
    nets = [group for group in groups if group.network == "control_deep"]
    assert max(len(group.ids) for group in nets) >= 3, "pictures with one net share its call"


@pytest.mark.slow
def test_a_deterministic_picture_has_the_bytes_that_it_has_alone(model: Pipeline) -> None:
    assert_deterministic(model, MIXED)


def test_rows_with_and_without_nets_may_share_calls(model: Pipeline) -> None:
    assert_rides(model, MIXED[:6])


def test_strength_0_is_the_plain_picture(model: Pipeline) -> None:
    plain, controlled = images_of(model, asked(), asked(replace(FIRST, strength=0.0)))
    assert torch.equal(plain, controlled)


@pytest.mark.parametrize(
    ("control", "message"),
    [
        (Control("frist", "a"), "controls must name ControlNets of the model, such as first, "),
        (Control("first"), "controls with 'first': needs the picture of its map"),
        (Control("first", "wide"), "controls with 'first': its map is 64x32, the picture 128x96"),
        (Control("first", "broken"), "controls with 'first': its map must be a PNG"),
        (Control("union", "a"), "controls with 'union': type must be one of openpose, depth"),
    ],
)
def test_wrong_controls_are_refused(model: Pipeline, control: Control, message: str) -> None:
    wrong = {"wide": file_of(Image.new("RGB", (64, 32))), "broken": b"no picture"}
    (result,) = model.generate([replace(asked(control), maps=FILES | wrong)])
    assert isinstance(result.error, InvalidParams)
    assert str(result.error).startswith(message)


@pytest.mark.parametrize("resize", ["crop", "fill", "stretch"])
def test_maps_of_other_proportions(model: Pipeline, resize: str) -> None:
    picture = Image.linear_gradient("L").resize((200, 100))
    control = Control("first", "m", resize=resize, preprocess="canny", low=1, high=5)
    params = model.resolve(asked(control).params)
    (shown,) = maps_of(params, {"m": file_of(picture)})
    assert shown.shape == (3, *SIZE[::-1]) and set(shown.unique().tolist()) <= {0.0, 1.0}


def test_only_masked_edits_read_the_maps_part(model: Pipeline) -> None:
    whole = drawing(256, 256)
    mask = Image.new("L", whole.size)
    mask.paste(255, (32, 64, 96, 112))
    given = GivenImage.read(file_of(whole), file_of(mask))
    params = given.sized(replace(asked(FIRST).params, mask_padding=0), model.sizes)
    source = given.source(params)
    (shown,) = maps_of(params, {"a": file_of(whole)}, source)
    (own,) = maps_of(replace(params, controls=(Control("first"),)), {}, source)
    assert torch.equal(shown, own), "the map is cut as the image is"


def test_nets_are_loaded_once_and_dropped_for_others(model: Pipeline, nets: dict[str, Any]) -> None:
    shelf: Any = model.engines.controls
    size = max(sum(p.numel() for p in net.parameters()) for net in nets.values()) * 4
    small = replace(shelf, room=2 * size, _loaded=OrderedDict(), loads=0)
    first, second, union = (model.catalogue.find("control", name) for name in nets)
    leased = small.lease([first, second])
    with pytest.raises(NoRoom, match="other requests leave no room for 'union'"):
        small.lease([union])
    with pytest.raises(InvalidParams, match="controls must take at most 0.0[0-9]+ GiB together"):
        small.lease([first, second, union])
    del leased
    assert small.lease([union])["union"].types == len(TYPES)
    assert small.delay_s([first]) > 0 == small.delay_s([second, union])
    small.lease([second, union])
    assert small.loads == 3
