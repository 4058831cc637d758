"""The VAE with its scaling folded in: the sampler's latents → an image, and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDES = ((1, 0), (0, 1))
"""padding (before, after) for the even and for the odd output pixel"""
LEAST_LOG, MOST_LOG = -30.0, 20.0
"""Bounds of a log-variance, as in diffusers."""


class Doubled(nn.Module):
    """Doubles each pixel in both directions, then convolves 3×3. The nine taps read only four
    different pixels, so a graph has four 2×2 convolutions with summed weights instead: 4/9 of the
    arithmetic. Runtimes sum the weights at load; PyTorch would do so in every call."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, output_size: None = None) -> Tensor:
        if not torch.compiler.is_exporting():
            return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        lines = [
            torch.stack([self.quarter(x, down, right) for right in SIDES], dim=-1) for down in SIDES
        ]
        return torch.stack([line.flatten(-2) for line in lines], dim=3).flatten(2, 3)

    def quarter(self, x: Tensor, down: tuple[int, int], right: tuple[int, int]) -> Tensor:
        """Compute one of the four output pixels of each input pixel."""
        weight = summed(summed(self.conv.weight, 2, down), 3, right)
        return F.conv2d(F.pad(x, (*right, *down)), weight, self.conv.bias)


def summed(weight: Tensor, axis: int, side: tuple[int, int]) -> Tensor:
    """Sum the two of three taps that read the same pixel."""
    first, middle, last = weight.split(1, axis)
    taps = (first, middle + last) if side == SIDES[0] else (first + middle, last)
    return torch.cat(taps, axis)


class VaeDecoder(nn.Module):
    scale: Tensor
    shift: Tensor

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.post_quant_conv = vae.post_quant_conv
        self.decoder = vae.decoder
        for block in self.decoder.up_blocks[:-1]:
            (upsampler,) = block.upsamplers
            if not isinstance(upsampler, Doubled):
                block.upsamplers = nn.ModuleList([Doubled(upsampler.conv)])
        _register_affine(self, vae.config)

    def forward(self, latents: Tensor) -> tuple[Tensor]:
        latents = latents * self.scale + self.shift
        if self.post_quant_conv is not None:
            latents = self.post_quant_conv(latents)
        return (self.decoder(latents),)


class VaeEncoder(nn.Module):
    """An image → mean and deviation of its latents."""

    scale: Tensor
    shift: Tensor

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.encoder = vae.encoder
        self.quant_conv = vae.quant_conv
        _register_affine(self, vae.config)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        moments = self.encoder(image)
        if self.quant_conv is not None:
            moments = self.quant_conv(moments)
        mean, log_variance = moments.chunk(2, dim=1)
        deviation = torch.exp(0.5 * log_variance.clamp(LEAST_LOG, MOST_LOG))
        return (mean - self.shift) / self.scale, deviation / self.scale


def _register_affine(module: nn.Module, config: Any) -> None:
    """Register a scale and shift per channel. Most checkpoints have one factor; some also have a
    mean and deviation per channel."""
    channels = config.latent_channels
    mean = getattr(config, "latents_mean", None) or [0.0] * channels
    std = getattr(config, "latents_std", None) or [1.0] * channels
    scale = torch.tensor(std).view(1, -1, 1, 1) / config.scaling_factor
    module.register_buffer("scale", scale, persistent=False)
    module.register_buffer("shift", torch.tensor(mean).view(1, -1, 1, 1), persistent=False)
