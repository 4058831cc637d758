"""Where an image's noise comes from: its own seed, and nothing else. It knows no schedulers."""

from __future__ import annotations

import torch
from torch import Tensor


class NoiseSource:
    """One image's noise: the start, then what an ancestral scheduler asks for step by step.

    Drawn in fp32 on the CPU from the image's own generator, as diffusers does, so it depends on
    the seed and the shape and on nothing else.
    """

    def __init__(self, seed: int, shape: tuple[int, int, int]) -> None:
        self.seed, self.shape = seed, shape
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def start(self) -> Tensor:
        """The first draw, whatever was drawn before."""
        self._generator.manual_seed(self.seed)
        return self.next()

    def next(self) -> Tensor:
        """The draw after the last one; diffusers' [1, channels, h, w] without its first axis."""
        return torch.randn(self.shape, generator=self._generator, dtype=torch.float32)
