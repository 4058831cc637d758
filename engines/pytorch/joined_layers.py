"""Layers that read the same input as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engines.pytorch.eight_bit import EightBit, rounded_lines


def joined(layers: Sequence[nn.Module]) -> nn.Module | None:
    """One layer for several that read the same input; None where they cannot be one."""
    if all(isinstance(layer, EightBit) for layer in layers):
        first, *others = alike(layers)
        weight, scale, bias = (
            torch.cat([getattr(layer, name) for layer in (first, *others)])
            for name in ("weight", "scale", "bias")
        )
        return EightBit(weight, scale, first.steps, bias, first.flags)
    if not all(isinstance(layer, nn.Linear) and layer.bias is None for layer in layers):
        return None
    weight = torch.cat([layer.weight for layer in layers])  # type: ignore[misc]
    joint = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    joint.weight = nn.Parameter(weight, requires_grad=False)
    return joint


def alike(layers: Sequence[Any]) -> Sequence[Any]:
    """8-bit layers of the same input, made to round it in the same way, so that it is rounded once.

    SmoothQuant gives each its own steps, a few percent apart; their least cuts off nothing that one
    of them would keep. Without numbers, on the meta device, they count as alike."""
    steps = torch.stack([layer.steps for layer in layers])
    if steps.is_meta or bool((steps == steps[0]).all()):
        return layers
    least = steps.amin(0)
    return [in_steps(layer, least) for layer in layers]


def in_steps(layer: EightBit, steps: Tensor) -> EightBit:
    """The same linear layer for an input in other steps: its weights are rounded once more."""
    stored, share = rounded_lines(layer.weight.float() * (layer.steps / steps), layer.number)
    return EightBit(stored, layer.scale * share, steps, layer.bias, layer.flags)
