"""At any size, Deep equals diffusers' UNet, and Shallow with Deep's cache equals Deep."""

from __future__ import annotations

import pytest
import torch

from sdxl.networks.attention import cross_attentions
from sdxl.networks.unet import DeepUNet, PromptUNet, ShallowUNet
from sdxl.specs import CUTS, Cut, network_specs
from tests.sdxl.unets import architecture, random_inputs, random_prompt, random_unet

SHAPES = [(2, 16, 16), (1, 24, 16), (3, 17, 15), (2, 18, 22)]


@pytest.fixture(scope="module", params=["mini", "mid"])
def size(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def unet(size: str) -> torch.nn.Module:
    return random_unet(size)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("rows", "h", "w"), SHAPES)
def test_deep_equals_diffusers(
    unet: torch.nn.Module, size: str, cut: Cut, rows: int, h: int, w: int
) -> None:
    inputs, prompt = random_inputs(size, rows, h, w), random_prompt(size, rows, h, w)
    sample, timestep = inputs["sample"], inputs["timestep"]
    expected = random_unet(size)(
        sample,
        timestep,
        prompt["context"],
        added_cond_kwargs={"text_embeds": prompt["pooled"], "time_ids": prompt["time_ids"]},
    ).sample
    ready = PromptUNet(unet)(*prompt.values())
    noise = DeepUNet(unet, cut)(sample, timestep, *ready)[0]
    difference = float((noise - expected).abs().max())
    assert difference <= 1e-5, f"differs by {difference:.2e}, allowed 1e-5"


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("rows", "h", "w"), SHAPES)
def test_shallow_on_deeps_cache_equals_deep(
    unet: torch.nn.Module, size: str, cut: Cut, rows: int, h: int, w: int
) -> None:
    inputs = random_inputs(size, rows, h, w)
    noise, *cache = DeepUNet(unet, cut)(*inputs.values())
    stem_inputs = [inputs[name] for name in ("sample", "timestep", "added")]
    (shallow,) = ShallowUNet(unet, cut)(*stem_inputs, *cache)
    difference = float((shallow - noise).abs().max())
    assert difference <= 1e-5, f"differs by {difference:.2e}, allowed 1e-5"


def test_the_unet_still_takes_an_encoded_prompt(unet: torch.nn.Module, size: str) -> None:
    """A UNet from which Deep was made still works in diffusers."""
    inputs, prompt = random_inputs(size, 2, 16, 16), random_prompt(size, 2, 16, 16)
    added = {"text_embeds": prompt["pooled"], "time_ids": prompt["time_ids"]}
    asked = inputs["sample"], inputs["timestep"], prompt["context"]
    DeepUNet(unet)
    found, expected = (u(*asked, added_cond_kwargs=added).sample for u in (unet, random_unet(size)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("size_", ["mini", "mid", "full"])
def test_widths_of_cross_attention_are_the_unets_own(size_: str) -> None:
    with torch.device("meta"):
        found = [each.to_k.out_features for each in cross_attentions(random_unet(size_))]
    assert architecture(size_).attention_widths == tuple(found)


def test_wrong_inputs_are_refused_with_the_reason() -> None:
    spec = network_specs(architecture("mini"))["unet_prompt"]
    shapes = {t.name: tuple(t.shape(dict.fromkeys(t.free_axes.values(), 8))) for t in spec.inputs}
    with pytest.raises(ValueError, match=r"'context'.*\(8, 8, 3\).*128"):
        spec.axes({**shapes, "context": (8, 8, 3)})
    with pytest.raises(ValueError, match="'pooled' is missing"):
        spec.axes({k: v for k, v in shapes.items() if k != "pooled"})
    with pytest.raises(ValueError, match=r"rows.*8"):
        spec.axes({**shapes, "pooled": (7, 64)})
