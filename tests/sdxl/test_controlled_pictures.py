"""Pictures with ControlNets, against diffusers' pipelines and among others in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sdxl.catalogue import Catalogue
from sdxl.controls import TYPES, Control
from sdxl.params import GenerationParams
from sdxl.picture_files import file_of
from sdxl.pipeline import Pipeline, WithPictures
from tests.conftest import assert_picture
from tests.sdxl.control_nets import random_control, random_union
from tests.sdxl.test_pipeline import set_scheduler
from tests.sdxl.their_schedulers import asked_of

SIZE = (128, 96)
NETS = {"first": lambda: random_control(1), "second": lambda: random_control(2)}
FIRST, SECOND, UNION = Control("first", "a"), Control("second", "b"), Control("union", "a")


def map_of(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*SIZE[::-1], 3), np.uint8))


MAPS = {"a": map_of(1), "b": map_of(2)}
FILES = {name: file_of(each) for name, each in MAPS.items()}


@pytest.fixture(scope="module")
def nets() -> dict[str, Any]:
    made = {name: make() for name, make in NETS.items()}
    return made | {"union": random_union(3)}


@pytest.fixture(scope="module")
def model(mini: Pipeline, nets: dict[str, Any], tmp_path_factory: Any) -> Iterator[Pipeline]:
    folder: Path = tmp_path_factory.mktemp("controlnets")
    for name, net in nets.items():
        net.save_pretrained(folder / name)
    yield replace(mini, catalogue=Catalogue(control_folders=[folder]))


def asked(*controls: Control, **fields: Any) -> WithPictures:
    usual = {"width": SIZE[0], "height": SIZE[1], "steps": 5, "seed": 7, "cache_interval": 1}
    params = GenerationParams("a red circle", **{**usual, **fields}, controls=controls or None)
    return WithPictures(params, maps=FILES)


@torch.inference_mode()
def theirs(pipe: Any, given: WithPictures, **more: Any) -> Tensor:
    params, controls = given.params, given.params.controls or ()
    set_scheduler(pipe, params.scheduler)
    several = len(controls) > 1
    each: dict[str, Any] = {
        "controlnet_conditioning_scale": [c.strength for c in controls],
        "control_guidance_start": [c.start for c in controls],
        "control_guidance_end": [c.end for c in controls],
    }
    maps = [MAPS[c.image] for c in controls]
    field = "image" if "image" not in more else "control_image"
    if "Union" in type(pipe).__name__:
        field, more["control_mode"] = "control_image", [TYPES.index(c.type or "") for c in controls]
        each = {n: v[0] if n.startswith("control_g") else v for n, v in each.items()}
    elif not several:
        each = {name: values[0] for name, values in each.items()}
    found: Tensor = pipe(
        **{field: maps if several or "Union" in type(pipe).__name__ else maps[0]},
        guess_mode=controls[0].mode == "guess",
        width=params.width,
        height=params.height,
        **each,
        **asked_of(params, "pt"),
        **more,
    ).images[0]
    return found * 2 - 1


def pipe_of(kind: str, base: Any, net: Any) -> Any:
    pipe = getattr(diffusers, f"StableDiffusionXLControlNet{kind}Pipeline")(
        **{n: each for n, each in base.components.items() if n != "scheduler"},
        scheduler=base.scheduler,
        controlnet=net,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


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
    pipe = pipe_of("", diffusers_mini, used if len(used) > 1 else used[0])
    assert_picture(result, theirs(pipe, given))
