"""What a picture that is made from another one adds to the loop: the latents it begins with, and
the part of them that stays, step after step. It knows no networks and no policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sdxl.noise import NoiseSource
from sdxl.schedulers import Table


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


@dataclass(frozen=True)
class KeptPart:
    """What the mask leaves, on the loop's device."""

    latents: Tensor
    noise: Tensor
    mask: Tensor

    def restore(self, latents: Tensor, table: Table, step: int) -> None:
        """Where nothing is to change: the source, as noisy as where that step begins."""
        latents.copy_(torch.lerp(table.noised(self.latents, self.noise, step), latents, self.mask))


def begin(
    source: SourceLatents, table: Table, noise: NoiseSource, device: torch.device
) -> tuple[Tensor, KeptPart | None]:
    """The latents that the first step begins with. A sample is drawn before the noise, as in
    diffusers."""
    latents, drawn = source.mean, noise.start()
    if source.deviation is not None:
        latents = latents + source.deviation * drawn
        drawn = noise.next()
    start = drawn * table.start if source.is_hidden else table.noised(latents, drawn)
    if source.mask is None:
        return start, None
    return start, KeptPart(*(each.to(device) for each in (latents, drawn, source.mask)))
