"""Painting during training, step by step and as in the service: every other step reuses the inner
tensors of the step before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from sdxl.mini.scenes import Image
from sdxl.networks.unet import DeepUNet, PromptUNet, ShallowUNet
from training.mini import topology
from training.mini.unet_training import UNetWithText, guide, time_ids

STEPS = 20
INTERVAL = 2


class Painting:
    """The sampling steps of a UNet. Rows may be at different steps, as in the service."""

    def __init__(self, unet: Any, device: torch.device | str) -> None:
        scheduler = topology.new_scheduler()
        scheduler.set_timesteps(STEPS)
        self.sigmas: Tensor = scheduler.sigmas.float().to(device)
        self.timesteps: Tensor = scheduler.timesteps.float().to(device)
        self._prompt, self._deep = PromptUNet(unet), DeepUNet(unet)
        self._shallow = ShallowUNet(unet)

    def read(self, context: Tensor, pooled: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        """Return the UNet's conditions for encoded captions and then for as many empty captions.
        `ids` are the size conditions of both."""
        both = (torch.cat([each, torch.zeros_like(each)]) for each in (context, pooled))
        conditions: tuple[Tensor, ...] = self._prompt(*both, ids)
        return conditions

    def finish(
        self,
        latents: Tensor,
        first: int,
        conditions: Sequence[Tensor],
        guidance: Tensor,
        interval: int = INTERVAL,
    ) -> Iterator[Tensor]:
        """Yield the latents before each step from `first` on, and the finished latents."""
        cache: Sequence[Tensor] = ()
        for at in range(first, STEPS):
            yield latents
            step = torch.full((len(latents),), at, device=latents.device)
            if (at - first) % interval == 0:
                noise, cache = self.deep(latents, step, conditions, guidance)
            else:
                noise = self.shallow(latents, step, conditions[0], cache, guidance)
            latents = self.stepped(latents, step, noise)
        yield latents

    def deep(
        self, latents: Tensor, step: Tensor, conditions: Sequence[Tensor], guidance: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the guided noise, and the tensors that `shallow` reuses."""
        noise, *cache = self._call(self._deep, latents, step, conditions)
        return guided(noise, guidance), cache

    def shallow(
        self,
        latents: Tensor,
        step: Tensor,
        added: Tensor,
        cache: Sequence[Tensor],
        guidance: Tensor,
    ) -> Tensor:
        (noise,) = self._call(self._shallow, latents, step, (added, *cache))
        return guided(noise, guidance)

    def sigma(self, step: Tensor) -> Tensor:
        """Return each row's sigma, shaped to multiply latents."""
        return self.sigmas[step].view(-1, 1, 1, 1)

    def stepped(self, latents: Tensor, step: Tensor, noise: Tensor) -> Tensor:
        """Return the latents after a step of Euler's method."""
        return latents + (self.sigma(step + 1) - self.sigma(step)) * noise

    def scaled(self, latents: Tensor, step: Tensor) -> Tensor:
        """Return the latents as a network's input."""
        return latents / (self.sigma(step) ** 2 + 1).sqrt()

    def _call(
        self, network: nn.Module, latents: Tensor, step: Tensor, rest: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        inputs = self.scaled(latents, step).repeat(2, 1, 1, 1)
        outputs: Sequence[Tensor] = network(inputs, self.timesteps[step].repeat(2), *rest)
        return outputs


def guided(noise: Tensor, guidance: Tensor) -> Tensor:
    """Combine the noise of rows with captions and then of the same rows without."""
    captioned, captionless = noise.float().chunk(2)
    return guide(captioned, captionless, guidance)


def read(
    painting: Painting, painter: UNetWithText, tokens: Tensor, tokens_2: Tensor
) -> tuple[Tensor, ...]:
    """Return the conditions for these captions, and then for empty ones."""
    context, pooled = painter.read(tokens, tokens_2)
    return painting.read(context, pooled, time_ids(context.repeat(2, 1, 1)))


@torch.no_grad()
def paint(
    painter: UNetWithText,
    begun: Tensor,
    tokens: Tensor,
    tokens_2: Tensor,
    guidance: Tensor,
    first: int = 0,
) -> Iterator[Tensor]:
    """Yield the latents before each step from `first` on, in the UNet's scale, and the finished
    latents. The noise of the first step is added to `begun`, a picture's latents or zeros."""
    painting, device = Painting(painter.unet, begun.device), begun.device
    latents = begun + painting.sigmas[first] * torch.randn_like(begun)
    conditions = read(painting, painter, tokens.to(device), tokens_2.to(device))
    yield from painting.finish(latents, first, conditions, guidance.to(device))


def to_images(vae: AutoencoderKL, latents: Tensor) -> list[Image]:
    """Decode unscaled latents."""
    decoded = vae.decode(latents.float()).sample.clamp(-1, 1)
    return list(((decoded + 1) * 127.5 + 0.5).byte().permute(0, 2, 3, 1).cpu().numpy())
