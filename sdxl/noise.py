"""An image's noise, from its seed only. It knows no schedulers."""

from __future__ import annotations

import torch
from torch import Tensor


class NoiseSource:
    """One image's noise: the start, then the draws of an ancestral scheduler. It is drawn in fp32
    on the CPU from the image's own generator, as diffusers does, so it depends only on seed and
    shape."""

    def __init__(self, seed: int, shape: tuple[int, int, int]) -> None:
        self.seed, self.shape = seed, shape
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def start(self) -> Tensor:
        """Return the first draw."""
        self._generator.manual_seed(self.seed)
        return self.next()

    def next(self) -> Tensor:
        """Return the next draw; diffusers' [1, channels, h, w] without its first axis."""
        return torch.randn(self.shape, generator=self._generator, dtype=torch.float32)
