"""Edits in the loop: the latents at the start, the part that each step keeps, and the extra input
of inpainting UNets.

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
    """An inpainting UNet's input besides the latents, which is the same at every step."""

    mask: Tensor
    """[1, h, w]: 1 where the image changes, else 0"""
    mean: Tensor
    """[channels, h, w]: latents of the picture, which is grey under the mask"""
    deviation: Tensor | None = None
    """set if the encoding is sampled"""

    def channels(self, noise: NoiseSource) -> Tensor:
        """Return [channels + 1, h, w]: the mask and the latents."""
        sampled = 0.0 if self.deviation is None else self.deviation * noise.next()
        return torch.cat([self.mask, self.mean + sampled])


@dataclass(frozen=True)
class SourceLatents:
    """The VAE encoder's output: float32, on the CPU."""

    mean: Tensor
    """[channels, h, w]"""
    deviation: Tensor | None = None
    """set if the encoding is sampled"""
    mask: Tensor | None = None
    """[1, h, w]: 1 where the image changes, 0 where it stays"""
    is_hidden: bool = False
    """True if the start is pure noise, as in diffusers for a mask at full strength"""
    masked: MaskedPicture | None = None
    """set for an inpainting UNet, which itself keeps the part outside the mask"""


@dataclass(frozen=True)
class KeptPart:
    """The part that the mask keeps, on the loop's device."""

    latents: Tensor
    noise: Tensor
    mask: Tensor

    def restore(self, latents: Tensor, table: Table, step: int) -> None:
        """Replace the kept part of the latents by the source with the noise of that step."""
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
    """Prepare an edit's start. Random numbers are drawn in diffusers' order: for the sampled
    encoding, the noise, and the sampled encoding of the masked image."""
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
