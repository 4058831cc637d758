"""A VAE rescaled for half precision computes the same, without overflow."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from sdxl.checkpoint import find
from sdxl.networks import halves
from sdxl.networks.halves import fit_halves
from sdxl.networks.vae import VaeDecoder, VaeEncoder
from sdxl.single_file.configs import SDXL_1_0

MOST = torch.finfo(torch.float16).max
LOUD = 2.0**13
"""multiplies the embedded model's sums, to hundreds of thousands as in a VAE that overflows"""
SMALL = 32
"""side of pictures that a VAE of SDXL's width computes in seconds, in halves on a CPU too"""


@pytest.fixture(scope="module")
def embedded() -> Any:
    return find("mini").part("vae").eval()


def changed(vae: Any, share: float, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the same VAE with its sums multiplied by `share`."""
    with monkeypatch.context() as patch:
        patch.setattr(halves, "SHARE", share)
        fit_halves(vae := copy.deepcopy(vae))
    return vae


def images(side: int = 96) -> Tensor:
    """Return two smooth images with edges."""
    across = torch.linspace(-1, 1, side).expand(side, side)
    disc = (across**2 + across.T**2 < 0.4).float() * 2 - 1
    return torch.stack([torch.stack([across, across.T, disc]), torch.stack([disc, disc, across])])


def latents(side: int = 96) -> Tensor:
    dims = 2, 4, side // 8, side // 8
    return torch.randn(dims, generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def both_ways(
    vae: Any, dtype: torch.dtype = torch.float32, side: int = 96
) -> tuple[Tensor, Tensor]:
    """Return the latents of the images, and the images of random latents."""
    vae = copy.deepcopy(vae)
    encoder, decoder = VaeEncoder(vae).to(dtype), VaeDecoder(vae).to(dtype)
    return encoder(images(side).to(dtype))[0].float(), decoder(latents(side).to(dtype))[0].float()


def decibels(found: Tensor, needed: Tensor) -> float:
    return float(-10 * ((found - needed) / 2).square().mean().log10())


def largest(vae: Any) -> float:
    """Return the largest value that any module returns while encoding or decoding."""
    found = [0.0]
    hooks = [
        module.register_forward_hook(lambda _, __, out: found.append(float(out.abs().max())))
        for half in (vae.encoder, vae.decoder)
        for module in half.modules()
        if not list(module.children())
    ]
    VaeEncoder(vae)(images())
    VaeDecoder(vae)(latents())
    for hook in hooks:
        hook.remove()
    return max(found)


def test_in_float32_it_is_the_same_to_the_bit(embedded: Any) -> None:
    fit_halves(fitted := copy.deepcopy(embedded))
    for found, needed in zip(both_ways(fitted), both_ways(embedded), strict=True):
        assert torch.equal(found, needed)


def test_halves_are_15_db_nearer_than_bfloat16(embedded: Any) -> None:
    fit_halves(fitted := copy.deepcopy(embedded))
    exact, brief = both_ways(embedded), both_ways(embedded, torch.bfloat16)
    for found, rough, needed in zip(both_ways(fitted, torch.float16), brief, exact, strict=True):
        assert decibels(found, needed) > max(60, decibels(rough, needed) + 15)


def test_values_that_would_overflow_are_computed(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loud = changed(embedded, LOUD, monkeypatch)
    fit_halves(fitted := copy.deepcopy(loud))
    with torch.inference_mode():
        assert largest(loud) > 2 * MOST > 2 * largest(fitted)
    exact = both_ways(loud)
    for found, plain, needed in zip(
        both_ways(fitted, torch.float16), both_ways(loud, torch.float16), exact, strict=True
    ):
        assert not plain.isfinite().all()
        assert decibels(found, needed) > 60


@pytest.mark.slow
def test_sdxl_s_own_size_is_near_in_half_precision_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """This uses the architecture of SDXL's VAE with random weights."""
    torch.manual_seed(0)
    vae = AutoencoderKL(**SDXL_1_0["vae"]).eval()
    exact = both_ways(vae, side=SMALL)
    fit_halves(fitted := copy.deepcopy(vae))
    floats, in_halves = both_ways(fitted, side=SMALL), both_ways(fitted, torch.float16, SMALL)
    for found, half, needed in zip(floats, in_halves, exact, strict=True):
        assert torch.equal(found, needed)
        assert decibels(half, needed) > 60
