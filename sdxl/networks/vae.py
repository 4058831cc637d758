"""The VAE's decoder with its scaling folded in: latents as the sampler has them → an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class VaeDecoder(nn.Module):
    scale: Tensor
    shift: Tensor

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.post_quant_conv = vae.post_quant_conv
        self.decoder = vae.decoder
        scale, shift = _affine(vae.config)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    def forward(self, latents: Tensor) -> tuple[Tensor]:
        latents = latents * self.scale + self.shift
        if self.post_quant_conv is not None:
            latents = self.post_quant_conv(latents)
        return (self.decoder(latents),)


def _affine(config: Any) -> tuple[Tensor, Tensor]:
    """A per-channel scale and shift; most checkpoints state one factor, some mean and deviation."""
    channels = config.latent_channels
    mean = getattr(config, "latents_mean", None) or [0.0] * channels
    std = getattr(config, "latents_std", None) or [1.0] * channels
    scale = torch.tensor(std).view(1, -1, 1, 1) / config.scaling_factor
    return scale, torch.tensor(mean).view(1, -1, 1, 1)
