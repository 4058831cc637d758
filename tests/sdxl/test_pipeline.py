"""Whole pictures equal diffusers', and each equals the same picture made alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor
from torch.testing import assert_close

from sdxl.image_codec import ImageDecoder
from sdxl.params import GenerationParams, InvalidParams
from sdxl.pipeline import Pipeline
from tests.conftest import assert_picture, images_of, psnr
from tests.sdxl.their_schedulers import EACH, FEW, diffusers_image

PROMPT = "a small yellow star above a green square on a white background"
SIZES = [(128, 128), (96, 160), (136, 120)]


@pytest.mark.parametrize(
    "steps", [1, 4, *(pytest.param(s, marks=pytest.mark.long) for s in (20, 50))]
)
@pytest.mark.parametrize("scheduler", EACH)
def test_pictures_equal_diffusers(
    mini: Pipeline, diffusers_mini: Any, scheduler: str, steps: int
) -> None:
    """Every size and guidance of one scheduler and step count is in flight together."""
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
        assert_picture(result, diffusers_image(diffusers_mini, result.params))


def test_empty_and_negative_prompts_equal_diffusers(mini: Pipeline, diffusers_mini: Any) -> None:
    prompts = [("", None), (" ", None), (PROMPT, None), (PROMPT, ""), (PROMPT, "a blue square")]
    asked = [
        GenerationParams(prompt, negative_prompt=negative, steps=4, seed=3, cache_interval=1)
        for prompt, negative in prompts
    ]
    for result in mini.generate(asked):
        assert_picture(result, diffusers_image(diffusers_mini, result.params))


@pytest.mark.parametrize("scheduler", EACH)
def test_interval_2_equals_the_full_unet_with_tensors_substituted(
    mini: Pipeline, diffusers_mini: Any, scheduler: str
) -> None:
    steps = 8 if scheduler in FEW else 20
    asked = GenerationParams(PROMPT, steps=steps, seed=5, scheduler=scheduler, cache_interval=2)
    params = mini.resolve(asked)
    paint = partial(diffusers_image, diffusers_mini)
    assert_as_substituted(mini, diffusers_mini.unet, [params], paint)


@contextmanager
def substituted(unet: Any) -> Iterator[None]:
    """DeepCache without its two networks: diffusers' own UNet runs in full at every call, and at
    shallow steps its inner tensors are replaced by those of the last deep step. Every second call
    is deep, from the first on; the UNet must be called once a step."""
    kept: dict[str, Tensor] = {}
    calls = 0

    def count(_module: Any, _inputs: Any) -> None:
        nonlocal calls
        calls += 1

    def swap(name: str) -> Any:
        def chosen(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
            if calls % 2 == 1:
                kept[name] = output
            return kept[name]

        return chosen

    places = {"up": unet.up_blocks[1]}
    places |= {f"skip{i}": r for i, r in enumerate(unet.down_blocks[0].resnets)}
    handles = [unet.register_forward_pre_hook(count)]
    handles += [each.register_forward_hook(swap(name)) for name, each in places.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def assert_as_substituted(
    model: Pipeline, unet: Any, asked: Sequence[Any], paint: Callable[[Any, str], Tensor]
) -> None:
    """`paint` makes diffusers' picture with that UNet."""
    for result, each in zip(model.generate(asked), asked, strict=True):
        with substituted(unet):
            expected = paint(each, "latent")
        assert result.latents is not None and result.shallow_steps, result.error
        assert_close(result.latents, expected, rtol=0, atol=1e-4)


def test_a_picture_is_the_same_alone_and_among_seven_others(mini: Pipeline) -> None:
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
    together = images_of(mini, *others[:4], one, *others[4:])
    found = psnr(together[4], *images_of(mini, one))
    assert found >= 60, f"{found:.1f} dB, needed 60"


def test_results_keep_their_order_and_say_what_ran(mini: Pipeline) -> None:
    results = mini.generate(
        GenerationParams("a star", seed=i, steps=2 + i % 2, cache_interval=2) for i in range(5)
    )
    assert [r.index for r in results] == list(range(5))
    assert [(r.deep_steps, r.shallow_steps) for r in results[:2]] == [(1, 1), (2, 1)]
    assert set(results[0].timings) == {"encode_s", "denoise_s", "decode_s"}


@pytest.mark.parametrize(("calls_ahead", "most"), [(0, 1), (1, 2)])
def test_an_asynchronous_device_decodes_a_picture_while_the_last_one_is_checked(
    calls_ahead: int, most: int, mini: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture that cannot be decoded does not harm other pictures."""
    started, under_way = itertools.count(), list[int]()
    seen, launch = list[int](), ImageDecoder.launch

    def counted(decoder: ImageDecoder, latents: Sequence[Tensor]) -> Callable[[], Tensor]:
        images, number = launch(decoder, latents), next(started)
        under_way.append(number)
        seen.append(len(under_way))

        def finished() -> Tensor:
            under_way.remove(number)
            if number == 1:
                raise RuntimeError("the device has gone")
            return images()

        return finished

    monkeypatch.setattr(ImageDecoder, "launch", counted)
    engines = replace(mini.engines, calls_ahead=calls_ahead, decode_batch=1)
    asked = [GenerationParams("a star", seed=i, steps=2, width=64, height=64) for i in range(4)]
    results = replace(mini, engines=engines).generate(asked)
    assert max(seen) == most and not under_way
    assert [r.image is None for r in results] == [False, True, False, False]
    assert str(results[1].error) == "the device has gone"


def test_sizes_the_engines_were_not_built_for_are_refused_before_they_run(mini: Pipeline) -> None:
    built = replace(mini, engines=replace(mini.engines, latent_sides=(8, 32)))
    assert (built.sizes.minimum, built.sizes.maximum) == (64, 256)
    with pytest.raises(InvalidParams, match="264"):
        built.resolve(GenerationParams("a", width=264))


def test_prompts_the_engines_were_not_built_for_are_refused_before_they_run(mini: Pipeline) -> None:
    built = replace(mini, engines=replace(mini.engines, most_chunks=3))
    built.check(GenerationParams("ring " * 225, seed=1))
    with pytest.raises(InvalidParams, match="prompt must have at most 225 tokens, got 226"):
        built.check(GenerationParams("ring " * 226, seed=1))
