"""Variations of a seed's noise by stable-diffusion-webui's interpolation, on every interface."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sdxl.noise import NoiseSource
from sdxl.params import GenerationParams, InvalidParams

SHAPE = (4, 16, 12)


def slerp(share: float, low: Tensor, high: Tensor) -> Tensor:
    """As in stable-diffusion-webui's modules/rng.py."""
    low_norm = low / torch.norm(low, dim=1, keepdim=True)
    high_norm = high / torch.norm(high, dim=1, keepdim=True)
    omega = torch.acos((low_norm * high_norm).sum(1))
    first = (torch.sin((1.0 - share) * omega) / torch.sin(omega)).unsqueeze(1) * low
    return first + (torch.sin(share * omega) / torch.sin(omega)).unsqueeze(1) * high


def test_the_noise_goes_towards_the_variations() -> None:
    one, other = (NoiseSource(seed, SHAPE).start() for seed in (1, 2))
    for share in (0.1, 0.5, 0.9):
        torch.testing.assert_close(
            NoiseSource(1, SHAPE, (2, share)).start(), slerp(share, one, other)
        )
    assert NoiseSource(1, SHAPE, (1, 0.5)).start().equal(one)
    torch.testing.assert_close(NoiseSource(1, SHAPE, (2, 1.0)).start(), other)


def test_pictures_of_a_request_vary_the_variation_or_the_seed() -> None:
    plain = GenerationParams(seed=5)
    assert [plain.picture(i, 5).seed for i in range(2)] == [5, 6]
    varied = GenerationParams(seed=5, variation_strength=0.2, variation_seed=7)
    pictures = [varied.picture(i, 5) for i in range(2)]
    assert [(each.seed, each.variation_seed) for each in pictures] == [(5, 7), (5, 8)]


def test_a_variation_seed_needs_a_strength() -> None:
    with pytest.raises(InvalidParams, match="variation_seed needs variation_strength above 0"):
        GenerationParams(variation_seed=7)
    assert GenerationParams(variation_strength=0.0).variation is None
