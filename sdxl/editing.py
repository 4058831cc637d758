"""Editing in the loop: the latents an edit starts from, the part that is kept after each step, and
the extra input of inpainting UNets.

It knows no networks and no policy.
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
    """The input of an inpainting UNet besides the latents, the same at every step."""

    mask: Tensor
    """[1, h, w]: 1 where the image changes, else 0"""
    mean: Tensor
    """[channels, h, w] of the picture, grey under the mask"""
    deviation: Tensor | None = None
    """where a sample is wanted"""

    def channels(self, noise: NoiseSource) -> Tensor:
        drawn = 0.0 if self.deviation is None else self.deviation * noise.next()
        return torch.cat([self.mask, self.mean + drawn])


@dataclass(frozen=True)
class SourceLatents:
    """The VAE encoder's output: float32, on the CPU."""

    mean: Tensor
    """[channels, h, w]"""
    deviation: Tensor | None = None
    """deviation, if the encoding is sampled"""
    mask: Tensor | None = None
    """[1, h, w]: 1 where the image changes, 0 where it stays"""
    is_hidden: bool = False
    """The start is pure noise without the image: diffusers does so only for a mask at full
    strength."""
    masked: MaskedPicture | None = None
    """for an inpainting UNet, which itself keeps what the mask does not cover"""


@dataclass(frozen=True)
class KeptPart:
    """The part that the mask keeps, on the loop's device."""

    latents: Tensor
    noise: Tensor
    mask: Tensor

    def restore(self, latents: Tensor, table: Table, step: int) -> None:
        """Restore the kept part: the source with the noise of that step."""
        latents.copy_(torch.lerp(table.noised(self.latents, self.noise, step), latents, self.mask))


class Beginning(NamedTuple):
    latents: Tensor
    """latents of the first step"""
    kept: KeptPart | None = None
    masked: Tensor | None = None
    """[channels, h, w], the UNet's extra input, on the loop's device"""


def begin(
    source: SourceLatents, table: Table, noise: NoiseSource, device: torch.device
) -> Beginning:
    """Prepare an edit's start. Random numbers are drawn in diffusers' order: a sample, the noise, a
    sample of the masked image."""
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
