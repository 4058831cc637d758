"""Layers that read the same input as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from engines.pytorch.eight_bit import EightBit


def joined(layers: Sequence[nn.Module]) -> nn.Module | None:
    """One layer for several that read the same input; None where they round it differently."""
    if all(isinstance(layer, EightBit) for layer in layers):
        first, *others = layers
        if not all(round_alike(first, other) for other in others):
            return None
        weight, scale, bias = (
            torch.cat([getattr(layer, name) for layer in layers])
            for name in ("weight", "scale", "bias")
        )
        return EightBit(weight, scale, first.steps, bias, first.flags)  # type: ignore[arg-type]
    if not all(isinstance(layer, nn.Linear) and layer.bias is None for layer in layers):
        return None
    weight = torch.cat([layer.weight for layer in layers])  # type: ignore[misc]
    joint = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    joint.weight = nn.Parameter(weight, requires_grad=False)
    return joint


def round_alike(one: Any, other: Any) -> bool:
    """Layers of the same input; without numbers, on the meta device, they count as alike."""
    return bool(one.steps.is_meta or torch.equal(one.steps, other.steps))
