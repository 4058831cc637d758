"""Whole pictures against diffusers' own pipeline, and alone against in company."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdxl.checkpoint import find
from sdxl.noise import NoiseSource
from sdxl.params import GenerationParams, InvalidParams
from sdxl.pipeline import Pipeline
from tests.conftest import psnr
from tests.sdxl.their_schedulers import EACH, eta_of, their_scheduler

CONFIG = json.loads((find("mini").folder / "scheduler" / "scheduler_config.json").read_text())
PROMPT = "a small yellow star above a green square on a white background"
SIZES = [(128, 128), (96, 160), (136, 120)]


def set_scheduler(pipe: Any, scheduler_name: str) -> None:
    """diffusers' own of that name."""
    pipe.scheduler = their_scheduler(scheduler_name, CONFIG)


def diffusers_image(pipe: Any, params: GenerationParams) -> Tensor:
    set_scheduler(pipe, params.scheduler)
    assert params.seed is not None
    image: Tensor = pipe(
        params.prompt,
        negative_prompt=params.negative_prompt,
        width=params.width,
        height=params.height,
        num_inference_steps=params.steps,
        guidance_scale=params.guidance,
        eta=eta_of(params.scheduler),
        generator=torch.Generator("cpu").manual_seed(params.seed),
        output_type="pt",
    ).images[0]
    return image * 2 - 1


@pytest.fixture(scope="module")
def restored(diffusers_mini: Any) -> Any:
    """diffusers' pipeline; its scheduler is put back for other modules."""
    scheduler = diffusers_mini.scheduler
    yield diffusers_mini
    diffusers_mini.scheduler = scheduler


@pytest.mark.parametrize(
    "steps", [1, 4, *(pytest.param(s, marks=pytest.mark.long) for s in (20, 50))]
)
@pytest.mark.parametrize("scheduler", EACH)
def test_pictures_equal_diffusers(
    mini: Pipeline, restored: Any, scheduler: str, steps: int
) -> None:
    """Every size and guidance of one scheduler and step count, in flight together."""
    asked = [
        GenerationParams(
            PROMPT,
            width=w,
            height=h,
            steps=steps,
            guidance=guidance,
            seed=7,
            scheduler=scheduler,
            cache_interval=1,
        )
        for (w, h), guidance in itertools.product(SIZES, (5.0, 1.0))
    ]
    for result in mini.generate(asked):
        assert result.error is None and result.image is not None
        expected = diffusers_image(restored, result.params)
        found = psnr(result.image.clamp(-1, 1), expected)
        assert found >= 60, f"{result.params}: {found:.1f} dB, needed 60"


def test_negative_prompts_mean_what_they_mean_in_diffusers(mini: Pipeline, restored: Any) -> None:
    asked = [
        GenerationParams(PROMPT, negative_prompt=negative, steps=4, seed=3, cache_interval=1)
        for negative in (None, "", "a blue square")
    ]
    for result in mini.generate(asked):
        assert result.image is not None
        found = psnr(result.image.clamp(-1, 1), diffusers_image(restored, result.params))
        assert found >= 60, f"{result.params.negative_prompt!r}: {found:.1f} dB, needed 60"


def test_interval_2_equals_the_full_unet_with_tensorssubstituted(
    mini: Pipeline, diffusers_mini: Any
) -> None:
    params = mini.resolve(GenerationParams(PROMPT, steps=20, seed=5, cache_interval=2))
    (result,) = mini.generate([params])
    (condition,) = mini.encode([params])
    expected = substituted(diffusers_mini, condition, params)
    assert result.latents is not None
    difference = float((result.latents - expected).abs().max())
    assert difference <= 1e-4, f"differs by {difference:.2e}, allowed 1e-4"


@torch.inference_mode()
def substituted(
    pipe: Any, condition: Any, params: GenerationParams, masked: Tensor | None = None
) -> Tensor:
    """diffusers' UNet in full at every step; at odd ones its inner tensors are the last ones'. An
    inpainting checkpoint's reads `masked` [channels, h, w] besides."""
    unet = pipe.unet
    kept: dict[str, Tensor] = {}
    step = 0

    def hook(name: str) -> Any:
        def swap(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
            if step % 2 == 0:
                kept[name] = output
            return kept[name]

        return swap

    places = {"up": unet.up_blocks[1]}
    places |= {f"skip{i}": r for i, r in enumerate(unet.down_blocks[0].resnets)}
    handles = [module.register_forward_hook(hook(name)) for name, module in places.items()]
    from diffusers import EulerDiscreteScheduler

    scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    scheduler.set_timesteps(params.steps)
    assert params.seed is not None and params.height and params.width
    shape = (4, params.height // 8, params.width // 8)
    x = NoiseSource(params.seed, shape).start()[None] * scheduler.init_noise_sigma
    added = {"text_embeds": condition.pooled, "time_ids": condition.time_ids}
    try:
        for step, t in enumerate(scheduler.timesteps):  # noqa: B007 (hooks read it)
            model_input = scheduler.scale_model_input(torch.cat([x, x]), t)
            if masked is not None:
                model_input = torch.cat([model_input, torch.stack([masked, masked])], dim=1)
            noise = unet(model_input, t, condition.context, added_cond_kwargs=added).sample
            guided = noise[1:] + params.guidance * (noise[:1] - noise[1:])
            x = scheduler.step(guided, t, x).prev_sample
    finally:
        for handle in handles:
            handle.remove()
    return x[0]


def test_a_picture_alone_and_among_seven_others(mini: Pipeline) -> None:
    one = GenerationParams(PROMPT, seed=11)
    others = [
        GenerationParams("a red circle", seed=1, steps=20),
        GenerationParams("two blue rings", seed=2, steps=15, scheduler="dpmpp_2m"),
        GenerationParams("a cross", seed=3, steps=25, cache_interval=3),
        GenerationParams("a star", seed=4, guidance=1.0),
        GenerationParams("a square", seed=5, scheduler="euler_a", cache_interval=1),
        GenerationParams("a triangle " * 40, seed=6),
        GenerationParams("a ring", seed=7, width=96, height=136),
    ]
    (alone,) = mini.generate([one])
    together = mini.generate([*others[:4], one, *others[4:]])
    assert all(r.error is None for r in together)
    assert alone.image is not None and together[4].image is not None
    found = psnr(together[4].image, alone.image)
    assert found >= 60, f"{found:.1f} dB, needed 60"


@pytest.mark.slow
def test_deterministic_gives_the_same_bytes_in_every_slot(mini: Pipeline) -> None:
    fixed = Pipeline(mini.checkpoint, mini.engines, is_deterministic=True)
    one = GenerationParams(PROMPT, seed=11, steps=4)
    neighbours = [GenerationParams("a cross", seed=s, steps=4, guidance=3.0) for s in range(7)]
    (alone,) = fixed.generate([one])
    for slot in range(8):
        company = fixed.generate([*neighbours[:slot], one, *neighbours[slot:]])
        image = company[slot].image
        assert alone.image is not None and image is not None
        assert torch.equal(image, alone.image), f"slot {slot} differs"


def test_results_keep_their_order_and_say_what_ran(mini: Pipeline) -> None:
    results = mini.generate(
        GenerationParams("a star", seed=i, steps=2 + i % 2, cache_interval=2) for i in range(5)
    )
    assert [r.index for r in results] == list(range(5))
    assert [(r.deep_steps, r.shallow_steps) for r in results[:2]] == [(1, 1), (2, 1)]
    assert set(results[0].timings) == {"encode_s", "denoise_s", "decode_s"}


def test_sizes_the_model_does_not_allow_are_refused(mini: Pipeline) -> None:
    for field, params in [
        ("width", GenerationParams(width=100)),
        ("height", GenerationParams(height=8)),
        ("width", GenerationParams(width=4096)),
    ]:
        with pytest.raises(InvalidParams, match=field):
            mini.generate([params])


def test_sizes_the_engines_were_not_built_for_are_refused_before_they_run(mini: Pipeline) -> None:
    built = replace(mini, engines=replace(mini.engines, latent_sides=(8, 32)))
    assert (built.sizes.minimum, built.sizes.maximum) == (64, 256)
    with pytest.raises(InvalidParams, match="264"):
        built.resolve(GenerationParams("a", width=264))
