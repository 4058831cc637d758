"""The double of SDXL behaves like the full size around its engines."""

from __future__ import annotations

import pytest
import torch

import engines
from sdxl.engine import call
from sdxl.images import encode, to_pixels
from sdxl.params import GenerationParams, InvalidParams
from sdxl.pipeline import Pipeline
from sdxl.specs import SDXL_1_0, network_specs
from tests.serve import double

NAMED = "must be package.module:function"
ONE = GenerationParams("a ring", seed=1, steps=2, cache_interval=2)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = double.write(tmp_path_factory.mktemp("double") / "sdxl", double.Settings(speed=1e6))
    return engines.load(str(folder), double.BACKEND)


def images_of(pipeline: Pipeline, *requests: GenerationParams) -> list[torch.Tensor]:
    return [r.image for r in pipeline.generate(requests) if r.image is not None]


def test_tensors_have_the_full_size_in_fp16(pipeline: Pipeline) -> None:
    specs = network_specs(pipeline.checkpoint.arch, "float16")
    assert pipeline.checkpoint.arch == SDXL_1_0
    for name in ("clip_l", "clip_g", "unet_prompt", "unet_deep", "unet_shallow"):
        assert pipeline.engines[name].spec == specs[name]


def test_a_picture_of_1024_by_1024_takes_two_to_four_megabytes(pipeline: Pipeline) -> None:
    (image,) = images_of(pipeline, ONE)
    assert image.shape == (3, 1024, 1024)
    size = len(encode(to_pixels(image), "png", ONE.as_dict() | {"width": 1024, "height": 1024}))
    assert 2e6 <= size <= 4e6, f"{size} bytes"


def test_a_picture_does_not_depend_on_its_batch(pipeline: Pipeline) -> None:
    """A swapped row would show."""
    others = [GenerationParams("a star", seed=seed, steps=3, cache_interval=2) for seed in (2, 3)]
    (alone,) = images_of(pipeline, ONE)
    together = images_of(pipeline, others[0], ONE, others[1])
    assert torch.equal(together[1], alone)
    assert not torch.equal(together[0], together[2])


def test_every_input_of_the_unet_changes_its_output(pipeline: Pipeline) -> None:
    engine = pipeline.engines["unet_deep"]
    axes = {"rows": 2, "tokens": 77, "latent_h": 16, "latent_w": 16}
    inputs = {
        t.name: torch.ones(t.shape(axes)).to(getattr(torch, t.dtype)) for t in engine.spec.inputs
    }
    plain = call(engine, SDXL_1_0, inputs)["noise"].clone()
    for name in ("sample", "timestep", "added", "keys_0", "values_69"):
        changed = {k: v.clone() for k, v in inputs.items()}
        changed[name][1] *= 50
        noise = call(engine, SDXL_1_0, changed)["noise"]
        assert torch.equal(noise[0], plain[0]) and not torch.equal(noise[1], plain[1]), name


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        *((name, NAMED) for name in ("no.such:load", ":", f"{double.__name__}:")),
        (f"{double.__name__}:nothing", NAMED),
        (double.BACKEND, "that this module wrote"),
    ],
)
def test_another_backend_and_another_model_are_refused(backend: str, message: str) -> None:
    with pytest.raises(InvalidParams, match=message):
        engines.load("mini", backend)
