"""What a picture that is made from another one adds to the loop: the latents it begins with, the
part of them that stays, step after step, and what a UNet made for inpainting is shown of it. It
knows no networks and no policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sdxl.noise import NoiseSource
from sdxl.schedulers import Table


@dataclass(frozen=True)
class MaskedPicture:
    """What a UNet made for inpainting reads beside the latents, the same at every step."""

    mask: Tensor
    """[1, h, w]: 1 where it is made anew, else 0"""
    mean: Tensor
    """[channels, h, w] of the picture, grey under the mask"""
    deviation: Tensor | None = None
    """where a sample is wanted"""

    def channels(self, noise: NoiseSource) -> Tensor:
        drawn = 0.0 if self.deviation is None else self.deviation * noise.next()
        return torch.cat([self.mask, self.mean + drawn])


@dataclass(frozen=True)
class SourceLatents:
    """A picture as the VAE's encoder gives it: float32, on the CPU."""

    mean: Tensor
    """[channels, h, w]"""
    deviation: Tensor | None = None
    """where a sample is wanted: how far it strays"""
    mask: Tensor | None = None
    """[1, h, w]: 1 where it is made anew, 0 where it stays"""
    is_hidden: bool = False
    """The start is pure noise, with no trace of the picture: so diffusers fills a mask at full
    strength, and only then."""
    masked: MaskedPicture | None = None
    """for a UNet that reads one: it keeps what the mask does not cover by itself"""


@dataclass(frozen=True)
class KeptPart:
    """What the mask leaves, on the loop's device."""

    latents: Tensor
    noise: Tensor
    mask: Tensor

    def restore(self, latents: Tensor, table: Table, step: int) -> None:
        """Where nothing is to change: the source, as noisy as where that step begins."""
        latents.copy_(torch.lerp(table.noised(self.latents, self.noise, step), latents, self.mask))


class Beginning(NamedTuple):
    latents: Tensor
    """that the first step begins with"""
    kept: KeptPart | None = None
    masked: Tensor | None = None
    """[channels, h, w] that the UNet reads besides, on the loop's device"""


def begin(
    source: SourceLatents, table: Table, noise: NoiseSource, device: torch.device
) -> Beginning:
    """In the order in which diffusers draws: a sample, the noise, a sample of what is masked."""
    latents, drawn = source.mean, noise.start()
    if source.deviation is not None:
        latents = latents + source.deviation * drawn
        drawn = noise.next()
    start = drawn * table.start if source.is_hidden else table.noised(latents, drawn)
    if source.masked is not None:
        return Beginning(start, masked=source.masked.channels(noise).to(device))
    if source.mask is None:
        return Beginning(start)
    kept = KeptPart(*(each.to(device) for each in (latents, drawn, source.mask)))
    return Beginning(start, kept)
