"""The inputs of a picture's ControlNets: its maps as tensors, and the strength of each residual.

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
    """One picture's inputs to a ControlNet's calls."""

    net: ControlNet
    hints: Mapping[str, Tensor]
    """inputs of `control_prompt` besides the conditioning, without the row axis; on the CPU"""
    strengths: Rows
    window: Window


def control_inputs(
    controls: Iterable[Control], nets: Mapping[str, ControlNet], maps: Sequence[Tensor]
) -> tuple[ControlInput, ...]:
    """Return the inputs sorted by net. A union's maps with equal steps and mode share one input."""
    groups: dict[object, list[tuple[Control, Tensor]]] = {}
    for index, (control, hint) in enumerate(zip(controls, maps, strict=True)):
        if not control.strength:
            continue
        is_union = nets[control.name].types > 0
        key = (control.name, control.start, control.end, control.mode) if is_union else index
        groups.setdefault(key, []).append((control, hint))
    inputs = [_input(entries, nets[entries[0][0].name]) for entries in groups.values()]
    return tuple(sorted(inputs, key=lambda each: each.window))


def _input(entries: Sequence[tuple[Control, Tensor]], net: ControlNet) -> ControlInput:
    first, hint = entries[0]
    strength, hints = first.strength, {"hint": hint}
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
    """Return each ControlNet's preprocessed map, [3, height, width] in 0..1. Raise InvalidParams
    for a map that is missing or wrong."""
    images = (shown_map(each, params, pictures, source) for each in params.controls or ())
    return [torch.from_numpy(np.array(image)).movedim(-1, 0).float() / 255 for image in images]
