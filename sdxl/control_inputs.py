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
from sdxl.controls import POSITIVE_ONLY, Control, Window
from sdxl.params import GenerationParams
from sdxl.source import SourceImage

SOFT = 0.825
"""ratio of neighbouring weights of the modes "prompt" and "control" (sd-webui-controlnet,
scripts/hook.py)"""
SOFT_COUNT = 13
"""the residuals of Stable Diffusion 1; SDXL's ten have the first ten of its weights"""
Rows = tuple[list[float], list[float]]
"""the strengths of the residuals in the positive and the negative row"""


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


def residual_strengths(mode: str, strength: float, count: int) -> Rows:
    """Return the strengths of `count` residuals in a mode; the middle block's is the last."""
    strengths = [strength * weight for weight in _weights(mode, count)]
    return strengths, [0.0] * count if mode in POSITIVE_ONLY else strengths


def _weights(mode: str, count: int) -> list[float]:
    if mode == "balanced":
        return [1.0] * count
    if mode == "guess":
        # Like torch.logspace(-1, 0, count).
        return [10 ** (index / (count - 1) - 1) for index in range(count)]
    return [SOFT ** (SOFT_COUNT - 1 - index) for index in range(count)]


def union_strengths(strengths: Sequence[float]) -> tuple[list[float], float]:
    """Return the scales of a union's hints, and the strength of its residuals. As in diffusers, a
    single hint's strength scales the residuals; several hints are scaled before they are joined."""
    return ([1.0], strengths[0]) if len(strengths) == 1 else ([*strengths], 1.0)


def maps_of(
    params: GenerationParams, pictures: Pictures, source: SourceImage | None = None
) -> list[Tensor]:
    """Return each ControlNet's preprocessed map, [3, height, width] in 0..1. Raise InvalidParams
    for a map that is missing or wrong."""
    images = (shown_map(each, params, pictures, source) for each in params.controls or ())
    return [torch.from_numpy(np.array(image)).movedim(-1, 0).float() / 255 for image in images]
