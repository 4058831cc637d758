"""Linear layers in 8 bits with random weights."""

from __future__ import annotations

import torch

from engines.pytorch.eight_bit import LARGEST, EightBit

E4M3 = torch.float8_e4m3fn


def eight_bit_layer(inside: int, out: int, number: torch.dtype = E4M3) -> EightBit:
    """As calibrated on values of which few reach 4."""
    largest = LARGEST[number]
    weight = torch.randn(out, inside) / inside**0.5
    scale = weight.abs().amax(1) / largest
    stored = (weight / scale[:, None]).round() if number == torch.int8 else weight / scale[:, None]
    steps = torch.full((inside,), largest / 5.0)
    return EightBit(stored.to(number), scale / steps[0], steps, torch.zeros(out))
