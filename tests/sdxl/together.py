"""Pictures of requests with ControlNets, image prompts or a refiner, made in one loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor

from sdxl.inflight import Finished
from sdxl.pipeline import Pipeline, WithPictures
from tests.conftest import assert_picture
from tests.sdxl.flights import launched_groups
from tests.sdxl.reference import denoise
from tests.sdxl.test_editing import Edit


def assert_deterministic(model: Pipeline, asked: Sequence[Any]) -> None:
    """Under `is_deterministic` each picture has the same bytes as alone."""
    exact = replace(model, is_deterministic=True)
    for result, given in zip(exact.generate(asked), asked, strict=True):
        (alone,) = exact.generate([given])
        assert result.image is not None and alone.image is not None, result.error
        assert torch.equal(result.image, alone.image), result.params


def assert_as_plain_loop(model: Pipeline, asked: Sequence[WithPictures]) -> None:
    for given in asked:
        refiner = model.refiner.engines if model.refiner else None
        expected = denoise(model.engines, request(model, given), refiner)
        (result,) = model.generate([given])
        assert_picture(result, model.image_decoder.image(expected).clamp(-1, 1))


def assert_rides(model: Pipeline, asked: Sequence[WithPictures]) -> None:
    """Rows of all variants may share one deep call, as on a GPU."""
    alone = [model.generate([each])[0] for each in asked]
    loop = model.in_flight()
    loop.limits = replace(loop.limits, rides=True)
    ids = [loop.submit(request(model, each)) for each in asked]
    with launched_groups() as groups:
        loop.tick()
    assert [group.network for group in groups].count("unet_deep") == 1, "one call for all"
    found = {e.id: e.latents for e in loop.drain() if isinstance(e, Finished)}
    for id_, expected in zip(ids, alone, strict=True):
        assert_picture(expected, model.image_decoder.image(found[id_]).clamp(-1, 1))


def assert_edit_as_diffusers(
    model: Pipeline, given: Edit, maps: Mapping[str, bytes], theirs: Callable[..., Tensor]
) -> None:
    """`theirs` makes diffusers' picture from more arguments of its pipeline. The latents are given,
    because diffusers samples an encoded picture and we take the mean."""
    (result,) = model.generate([replace(given, maps=maps)])
    more: dict[str, Any] = {"image": given.source.image, "strength": given.params.strength}
    if given.source.mask is not None:
        more["mask_image"] = given.source.mask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiagonalGaussianDistribution, "sample", lambda self, _: self.mean)
        assert_picture(result, theirs(**more))


def request(model: Pipeline, given: WithPictures) -> Any:
    params = model.check(given.params)
    (conditioning,) = model.encode([params], adapters=[model.adapters(model.uses(params))])
    given = replace(given, params=params)
    conditioning = model.prompted(conditioning, given)
    controls = model.controls(params, conditioning, given)
    return model.request(params, conditioning, controls=controls)
