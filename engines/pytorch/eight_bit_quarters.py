"""A 3×3 convolution of a doubled map, in 8 bits: each of the four pixels that a pixel becomes is a
2×2 convolution of what was not doubled, 4/9 of the arithmetic. The weights' sums are made once, and
rounded once more.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.pytorch.eight_bit import EightBit, rounded_lines
from sdxl.networks.vae import SIDES, summed


class EightBitQuarters(EightBit):
    """`weight` is [4, out, 2, 2, in], a quarter for each of the four pixels, line by line; `scale`
    has a value for each of the quarters' channels."""

    def _reference(self, stored: Tensor, residual: Tensor | None) -> Tensor:
        weight = self.weight.float() * self.scale.view(4, -1, 1, 1, 1)
        sides = [(*right, *down) for down in SIDES for right in SIDES]
        found = [
            F.conv2d(F.pad(stored.float(), side), quarter.permute(0, 3, 1, 2), self.bias)
            for side, quarter in zip(sides, weight, strict=True)
        ]
        lines = [torch.stack(pair, -1).flatten(-2) for pair in (found[:2], found[2:])]
        out = torch.stack(lines, 3).flatten(2, 3)
        return out if residual is None else out + residual.float()


def quartered(layer: EightBit) -> EightBitQuarters:
    """A 3×3 convolution's, for the same input before it is doubled."""
    weight = layer.weight.float()
    sums = [summed(summed(weight, 1, down), 2, right) for down in SIDES for right in SIDES]
    joint = torch.cat(sums)
    stored, share = rounded_lines(joint.flatten(1), layer.number)
    stored = stored.view(4, *sums[0].shape)
    return EightBitQuarters(
        stored, layer.scale.repeat(4) * share, layer.steps, layer.bias, layer.flags
    )
