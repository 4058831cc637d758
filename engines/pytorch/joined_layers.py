"""Joins layers that read the same input into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engines.low_rank import name_layer, names_of, put_hook
from engines.pytorch.eight_bit import EightBit, all_eight_bit, rounded_lines


def joined(layers: Sequence[nn.Module]) -> nn.Module | None:
    """Join layers that read the same input; return None if they cannot be one layer."""
    if all_eight_bit(layers):
        first, *others = alike(layers)
        weight, scale, bias = (
            torch.cat([getattr(layer, name) for layer in (first, *others)])
            for name in ("weight", "scale", "bias")
        )
        return _with_names(EightBit(weight, scale, first.steps, bias, first.flags), layers)
    if not all(isinstance(layer, nn.Linear) and layer.bias is None for layer in layers):
        return None
    weight = torch.cat([layer.weight for layer in layers])  # type: ignore[misc]
    joint = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    joint.weight = nn.Parameter(weight, requires_grad=False)
    put_hook(joint, _names(layers))
    return joint


def _names(layers: Sequence[nn.Module]) -> tuple[str, ...]:
    return tuple(name for layer in layers for name in names_of(layer))


def _with_names(layer: EightBit, origins: Sequence[nn.Module]) -> EightBit:
    name_layer(layer, _names(origins))
    return layer


def alike(layers: Sequence[Any]) -> Sequence[Any]:
    """Give 8-bit layers of the same input the same steps, so that the input is rounded once.

    SmoothQuant's steps differ by a few percent. The smallest steps clip no value that any of the
    layers keeps. The meta device has no values, so steps count as equal there."""
    steps = torch.stack([layer.steps for layer in layers])
    if steps.is_meta or bool((steps == steps[0]).all()):
        return layers
    least = steps.amin(0)
    return [_in_steps(layer, least) for layer in layers]


def _in_steps(layer: EightBit, steps: Tensor) -> EightBit:
    """Convert a linear layer to other steps of its input. Its weights are rounded again."""
    stored, factor = rounded_lines(layer.weight.float() * (layer.steps / steps), layer.number)
    converted = EightBit(stored, layer.scale * factor, steps, layer.bias, layer.flags)
    return _with_names(converted, [layer])
