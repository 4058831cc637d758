"""An image's noise, which depends only on seed and shape. It knows no schedulers."""

from __future__ import annotations

import torch
from torch import Tensor

Variation = tuple[int, float]
"""another seed, and the strength of its noise: 0 to 1"""
ALIKE = 0.9995
"""noises with a larger cosine are interpolated linearly"""


def between(noise: Tensor, other: Tensor, strength: float) -> Tensor:
    """Interpolate spherically, column by column, as stable-diffusion-webui does. Linear
    interpolation of two noises would give weaker noise."""
    cosine = (
        noise / noise.norm(dim=1, keepdim=True) * other / other.norm(dim=1, keepdim=True)
    ).sum(1)
    if cosine.mean() > ALIKE:
        return noise.lerp(other, strength)
    angle = cosine.acos()
    shares = [torch.sin(part * angle) / angle.sin() for part in (1 - strength, strength)]
    return shares[0].unsqueeze(1) * noise + shares[1].unsqueeze(1) * other


class NoiseSource:
    """One image's noise: the start, then the noise of an ancestral scheduler's steps. It is drawn
    in float32 on the CPU from the image's own generator, as in diffusers."""

    def __init__(
        self, seed: int, shape: tuple[int, int, int], variation: Variation | None = None
    ) -> None:
        self.seed, self.shape, self.variation = seed, shape, variation
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def start(self) -> Tensor:
        """Return the first noise, mixed with the noise of the variation's seed."""
        self._generator.manual_seed(self.seed)
        noise = self.next()
        if self.variation is None:
            return noise
        seed, strength = self.variation
        return between(noise, NoiseSource(seed, self.shape).start(), strength)

    def next(self) -> Tensor:
        """Return the next noise, [channels, h, w]."""
        return torch.randn(self.shape, generator=self._generator, dtype=torch.float32)
