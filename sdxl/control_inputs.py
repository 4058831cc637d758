"""What ControlNets read of a picture: its maps as tensors, and how much of each residual is added.

It knows no networks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sdxl.adapters import ControlNet
from sdxl.control_maps import Pictures, shown_map
from sdxl.control_strengths import Rows, residual_strengths, union_strengths
from sdxl.controls import Control, Window
from sdxl.params import GenerationParams
from sdxl.source import SourceImage


@dataclass(frozen=True, eq=False)
class ControlInput:
    """What one call of a ControlNet reads of a picture."""

    net: ControlNet
    hints: Mapping[str, Tensor]
    """inputs of `control_prompt` besides the conditioning, without rows; on the CPU"""
    strengths: Rows
    window: Window


def control_inputs(
    controls: Iterable[Control], nets: Mapping[str, ControlNet], maps: Sequence[Tensor]
) -> tuple[ControlInput, ...]:
    """Return the inputs by net. The maps of a union in the same steps and mode go together."""
    together: dict[object, list[tuple[Control, Tensor]]] = {}
    for index, (control, shown) in enumerate(zip(controls, maps, strict=True)):
        if not control.strength:
            continue
        is_union = nets[control.name].types > 0
        key = (control.name, control.start, control.end, control.mode) if is_union else index
        together.setdefault(key, []).append((control, shown))
    made = [_input(entries, nets[entries[0][0].name]) for entries in together.values()]
    return tuple(sorted(made, key=lambda each: each.window))


def _input(entries: Sequence[tuple[Control, Tensor]], net: ControlNet) -> ControlInput:
    first, shown = entries[0]
    strength, hints = first.strength, {"hint": shown}
    if net.types:
        scales, strength = union_strengths([control.strength for control, _ in entries])
        types = torch.zeros(len(entries), net.types)
        for row, (control, _) in enumerate(entries):
            types[row, control.type_number(net.types)] = 1
        maps = torch.stack([each for _, each in entries])
        hints = {"hints": maps, "hint_types": types, "hint_scales": torch.tensor(scales)}
    count = len(net.engines["control_deep"].spec.outputs)
    strengths = residual_strengths(first.mode, strength, count)
    return ControlInput(net, hints, strengths, first.window(net.key))


def maps_of(
    params: GenerationParams, pictures: Pictures, source: SourceImage | None = None
) -> list[Tensor]:
    """Return each ControlNet's map as it is given to it, [3, height, width] in 0..1. Raise
    InvalidParams for a map that is missing or wrong."""
    shown = (shown_map(each, params, pictures, source) for each in params.controls or ())
    return [torch.from_numpy(np.array(each)).movedim(-1, 0).float() / 255 for each in shown]
