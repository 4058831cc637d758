"""Linear layers in 8 bits with random weights."""

from __future__ import annotations

import torch

from engines.pytorch.eight_bit import E4M3 as E4M3
from engines.pytorch.eight_bit import EightBit
from engines.pytorch.launches import LARGEST


def eight_bit_layer(
    inside: int, out: int, number: torch.dtype = E4M3, most: float = 5.0
) -> EightBit:
    """A layer as calibrated on values up to `most`."""
    largest = LARGEST[number]
    weight = torch.randn(out, inside) / inside**0.5
    scale = weight.abs().amax(1) / largest
    stored = (weight / scale[:, None]).round() if number == torch.int8 else weight / scale[:, None]
    steps = torch.full((inside,), largest / most)
    return EightBit(stored.to(number), scale / steps[0], steps, torch.zeros(out))
