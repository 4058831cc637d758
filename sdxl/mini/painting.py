"""Pictures as the UNet paints them while it is trained, step by step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from sdxl.mini import topology
from sdxl.mini.scenes import Image
from sdxl.mini.unet_training import UNetWithText, guide

STEPS = 20


@torch.no_grad()
def paint(
    painter: UNetWithText,
    begun: Tensor,
    tokens: Tensor,
    tokens_2: Tensor,
    guidance: Tensor,
    first: int = 0,
) -> Iterator[Tensor]:
    """Latents before each step from `first` on, scaled as the UNet knows them, and the finished
    ones. `begun` is a picture, or zero, to which the noise of that step is added."""
    scheduler = topology.new_scheduler()
    scheduler.set_timesteps(STEPS)
    device = begun.device
    latents = begun + scheduler.sigmas[first].to(device) * torch.randn_like(begun)
    tokens, tokens_2, guidance = (t.to(device) for t in (tokens, tokens_2, guidance))
    for timestep in scheduler.timesteps[first:]:
        yield latents
        inputs = scheduler.scale_model_input(latents, timestep)
        timesteps = timestep.to(device).repeat(len(inputs))
        predicted = painter.with_and_without(inputs, timesteps, tokens, tokens_2)
        latents = scheduler.step(guide(*predicted, guidance), timestep, latents).prev_sample
    yield latents


def to_images(vae: AutoencoderKL, latents: Tensor) -> list[Image]:
    """Of unscaled latents."""
    decoded = vae.decode(latents.float()).sample.clamp(-1, 1)
    return list(((decoded + 1) * 127.5 + 0.5).byte().permute(0, 2, 3, 1).cpu().numpy())
