"""The decoder in 8 bits: near the exact picture, independent of other pictures, and a NaN shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.parity.findings import psnr
from engines.pytorch import fast_vae
from engines.pytorch.eight_bit import EightBit, put_decoder_layers
from engines.pytorch.fast_vae import attend_by_products, rearrange_decoder
from engines.pytorch.torch_engine import load_torch
from engines.pytorch.torch_options import TorchOptions
from sdxl.checkpoint import find
from sdxl.networks.halves import fit_halves
from sdxl.networks.parts import networks_of
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline
from tests.engines.distances import check_near

LEAST_DB = 37.0
PICTURES = [
    GenerationParams("a red circle on a blue background", seed=3, steps=8),
    GenerationParams("a small yellow star above a green square", seed=1, steps=8),
]


@pytest.fixture(scope="module")
def latents(mini: Pipeline) -> Tensor:
    found = [result.latents for result in mini.generate(PICTURES)]
    return torch.stack([each for each in found if each is not None])


def decoder(*, is_eight_bit: bool, is_rearranged: bool = False) -> nn.Module:
    vae = find("mini").part("vae")
    fit_halves(vae)
    network: Any = networks_of("vae", vae)["vae_decoder"]
    if is_eight_bit:
        put_decoder_layers(network.decoder)
    if is_rearranged:
        rearrange_decoder(network.to(memory_format=torch.channels_last).decoder)
    return network


def decoded(network: nn.Module, latents: Tensor) -> Tensor:
    with torch.inference_mode():
        image: Tensor = network(latents)[0].clamp(-1, 1)
    return image


@pytest.mark.parametrize("is_rearranged", [False, True])
def test_pictures_stay_near_the_exact_ones(latents: Tensor, is_rearranged: bool) -> None:
    exact = decoded(decoder(is_eight_bit=False), latents)
    found = decoded(decoder(is_eight_bit=True, is_rearranged=is_rearranged), latents)
    measured = [psnr(a, b) for a, b in zip(found, exact, strict=True)]
    print([f"{each:.1f} dB" for each in measured])
    assert min(measured) >= LEAST_DB, f"{measured}, at least {LEAST_DB}"
    assert not torch.equal(found, exact)


def test_a_picture_has_no_part_in_another(latents: Tensor) -> None:
    network = decoder(is_eight_bit=True, is_rearranged=True)
    broken = latents.clone()
    broken[0, 1, 2, 3] = torch.nan
    found = decoded(network, broken)
    assert found[0].isnan().any() and torch.equal(found[1], decoded(network, latents)[1])


def test_the_resblocks_convolutions_are_in_8_bits_and_nothing_else() -> None:
    network = decoder(is_eight_bit=True)
    short = {name for name, each in network.named_modules() if isinstance(each, EightBit)}
    blocks = {name.rpartition(".")[0] for name in short}
    assert short == {f"{block}.conv{i}" for block in blocks for i in (1, 2)}
    assert all(".resnets." in name for name in short)
    plain = decoder(is_eight_bit=False).named_modules()
    assert len(blocks) == sum(type(each).__name__ == "ResnetBlock2D" for _, each in plain)


def test_an_8_bit_unet_has_an_8_bit_decoder_unless_an_option_forbids_it(
    mini: Pipeline, numbers_of: Callable[[str], Path]
) -> None:
    for line, expected in (("", True), ("no-fp8_decoder", False)):
        loaded = load_torch(
            mini.checkpoint,
            device="cpu",
            precision="fp8",
            numbers=[numbers_of("fp8")],
            options=TorchOptions.parse(line),
        )
        network: Any = loaded["vae_decoder"]
        found = any(isinstance(each, EightBit) for each in network.module.modules())
        assert found == expected, line


@pytest.mark.parametrize("tokens", [5, 16, 37])
def test_a_wide_head_attends_by_products(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """The pieces do not divide the tokens. A NaN among the keys shows in its row alone."""
    monkeypatch.setattr(fast_vae, "QUERIES", 16)
    query, key, value = torch.randn(3, 2, tokens, 24)
    expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    check_near(attend_by_products(query, key, value), expected, 1e-6)
    key[1, 3, 4] = torch.nan
    found = attend_by_products(query, key, value)
    assert found.isnan().flatten(1).all(1).tolist() == [False, True]
    assert not found[0].isnan().any()


def test_a_decoder_of_sdxl_attends_by_products_alone() -> None:
    from eval.speed.estimated_time import works_of_a_picture

    works = [each for each in works_of_a_picture("fp8") if each.group == "attention"]
    assert works and {each.unit for each in works} == {"product"}
