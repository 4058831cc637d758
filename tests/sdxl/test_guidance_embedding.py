"""Checkpoints whose UNet reads guidance as an embedding, against diffusers' pipelines on the same
folder. An image has one row, whatever its guidance and negative prompt.
"""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.pytorch.fast_unet import rearrange
from engines.pytorch.torch_engine import load_torch
from onnx_export.check import example_inputs
from sdxl.checkpoint import CheckpointError, find
from sdxl.conditioning import embedded
from sdxl.networks.parts import networks_of
from sdxl.params import GenerationParams, InvalidParams
from sdxl.pipeline import Pipeline, WithPictures
from sdxl.specs import CHUNK, network_specs
from tests.conftest import assert_as_alone, assert_picture, images_of, psnr
from tests.sdxl.altered import write_embedding
from tests.sdxl.flights import launched_groups
from tests.sdxl.test_editing import edit, params_of, theirs
from tests.sdxl.test_pipeline import PROMPT, SIZES, assert_as_substituted
from tests.sdxl.their_schedulers import EACH_KIND, diffusers_image, opened_pipe, pipe_of

GUIDANCES = (0.0, 1.0, 8.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedding(tmp_path_factory.mktemp("models") / "sdxl-lcm")


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Any:
    return opened_pipe("", folder)


@pytest.mark.parametrize("scheduler", EACH_KIND)
def test_pictures_equal_diffusers(model: Pipeline, pipe: Any, scheduler: str) -> None:
    """All sizes and guidances are in flight together. A negative prompt is ignored."""
    usual: dict[str, Any] = {"steps": 4, "seed": 7, "scheduler": scheduler, "cache_interval": 1}
    asked = [
        GenerationParams(PROMPT, negative, width=w, height=h, guidance=guidance, **usual)
        for ((w, h), negative), guidance in itertools.product(
            zip(SIZES, (None, "a blue square", ""), strict=True), GUIDANCES
        )
    ]
    for result in model.generate(asked):
        assert_picture(result, diffusers_image(pipe, result.params))


@pytest.mark.parametrize("is_masked", [False, True], ids=["image", "mask"])
def test_edits_equal_diffusers(model: Pipeline, pipe: Any, is_masked: bool) -> None:
    pipes = [pipe_of(kind, pipe) for kind in ("Img2Img", "Inpaint")]
    asked = [
        edit(params_of("euler", SIZES[0], 0.6, steps=5, guidance=guidance), is_masked=is_masked)
        for guidance in GUIDANCES
    ]
    for result, each in zip(model.generate(asked), asked, strict=True):
        assert_picture(result, theirs(pipes, each))


def test_interval_2_equals_the_full_unet_with_tensors_substituted(
    model: Pipeline, pipe: Any
) -> None:
    asked = GenerationParams(PROMPT, steps=8, seed=5, guidance=6.0, cache_interval=2)
    paint = partial(diffusers_image, pipe)
    assert_as_substituted(model, pipe.unet, [model.resolve(asked)], paint)


def test_all_kinds_share_calls_of_one_row_each_and_equal_those_made_alone(model: Pipeline) -> None:
    usual: dict[str, Any] = {"steps": 6, "cache_interval": 2, "width": 128, "height": 128}
    text = GenerationParams(PROMPT, seed=3, guidance=5.0, **usual)
    asked: list[GenerationParams | WithPictures] = [
        text,
        replace(text, guidance=1.0, seed=4),
        replace(text, guidance=9.0, scheduler="dpmpp_2m", deep_steps=(0, 1, 4)),
        edit(params_of("ddim", (128, 128), 0.5, steps=6, guidance=3.0, cache_interval=2)),
        edit(params_of("euler_a", (128, 128), 1.0, steps=6, cache_interval=3), is_masked=True),
        replace(text, seed=5, upscale=1.25),
        replace(text, seed=6, upscale=1.25, upscaler="latent", upscale_strength=0.7),
    ]
    with launched_groups() as groups:
        together = model.generate(asked)
    assert max(len(group.ids) for group in groups) == len(asked)
    assert max(group.bucket for group in groups) == 8, "seven images are seven rows"
    assert_as_alone(model, together, asked)


@pytest.mark.parametrize(
    ("name", "value"), [("guidance_interval", (0.0, 0.5)), ("guided_steps", (0,))]
)
def test_guidance_in_a_part_of_the_steps_is_refused(model: Pipeline, name: str, value: Any) -> None:
    with pytest.raises(InvalidParams, match="reads the guidance in every step") as error:
        model.check(GenerationParams(PROMPT, **{name: value}))
    assert error.value.field == name


@pytest.mark.parametrize("channels", [4, 7, 256])
def test_an_embedding_equals_diffusers_to_the_bit(pipe: Any, channels: int) -> None:
    for guidance in (0.0, 1.0, 1.5, 7.3, 100.0):
        expected = pipe.get_guidance_scale_embedding(torch.tensor([guidance - 1]), channels)
        assert torch.equal(embedded(guidance, channels), expected[0])


def test_the_networks_rearranged_for_a_gpu_compute_the_same(folder: Path) -> None:
    checkpoint = find(str(folder))
    unet, arch = checkpoint.part("unet"), checkpoint.arch
    ours = copy.deepcopy(unet).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    rearrange(ours, "math")
    axes = {"rows": 3, "latent_h": 8, "latent_w": 8, "tokens": CHUNK}
    for name, spec in network_specs(arch).items():
        if not name.startswith("unet"):
            continue
        inputs = example_inputs(spec, axes, arch, 0)
        with torch.inference_mode():
            found, expected = (
                networks_of("unet", each)[name](*inputs.values()) for each in (ours, unet)
            )
        for one, other in zip(found, expected, strict=True):
            measured = float((one - other).norm() / other.norm())
            assert measured <= 2e-5, f"{name}: {measured:.2e}, at most 2e-05"


def test_half_precision_is_near_float32(folder: Path, model: Pipeline) -> None:
    half = Pipeline(model.checkpoint, load_torch(find(str(folder)), precision="bf16"))
    asked = GenerationParams(PROMPT, steps=4, seed=3, guidance=4.0)
    found = psnr(*images_of(half, asked), *images_of(model, asked))
    assert found >= 25, f"{found:.1f} dB, needed 25"


@pytest.mark.parametrize("channels", [1, 3, -4, True, "256", 2**20])
def test_another_embedding_is_refused(tmp_path: Path, channels: Any) -> None:
    odd = find(str(write_embedding(tmp_path / "odd")))
    config = odd.folder / "unet" / "config.json"
    facts = json.loads(config.read_text())
    config.write_text(json.dumps({**facts, "time_cond_proj_dim": channels}))
    with pytest.raises(CheckpointError, match="time_cond_proj_dim"):
        assert odd.arch
