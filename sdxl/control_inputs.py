"""What ControlNets read of a picture: its maps as pixels, and how much of each residual is added.

It knows no networks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from sdxl.adapters import ControlNet
from sdxl.canny import canny
from sdxl.control_strengths import Rows, residual_strengths, union_strengths
from sdxl.controls import CANNY, CROP, FILL, TYPES, Control, Window
from sdxl.params import GenerationParams, InvalidParams
from sdxl.source import SHARP, SourceImage, decode

FIELD = "controls"
TOLERANCE = 0.02
"""of the proportions of a map that is not resized explicitly"""
Pictures = Mapping[str, bytes]
"""The files of maps, by their `image` in a Control."""


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
            types[row, _type_of(control, net)] = 1
        maps = torch.stack([each for _, each in entries])
        hints = {"hints": maps, "hint_types": types, "hint_scales": torch.tensor(scales)}
    count = len(net.engines["control_deep"].spec.outputs)
    strengths = residual_strengths(first.mode, strength, count)
    return ControlInput(net, hints, strengths, first.window(net.key))


def _type_of(control: Control, net: ControlNet) -> int:
    known = TYPES[: net.types]
    if control.map_type not in known:
        needed = f"with {control.name!r}: type must be one of {', '.join(known)}"
        raise InvalidParams(FIELD, None, needed)
    return known.index(control.map_type)


def maps_of(
    params: GenerationParams, pictures: Pictures, source: SourceImage | None = None
) -> list[Tensor]:
    """Return each ControlNet's map as it is given to it, [3, height, width] in 0..1. Raise
    InvalidParams for a map that is missing or wrong."""
    shown = (shown_map(each, params, pictures, source) for each in params.controls or ())
    return [torch.from_numpy(np.array(each)).movedim(-1, 0).float() / 255 for each in shown]


def shown_map(
    control: Control, params: GenerationParams, pictures: Pictures, source: SourceImage | None
) -> Image.Image:
    """Return the map at the picture's size, preprocessed."""
    assert params.width and params.height
    size, given = (params.width, params.height), pictures.get(control.image)
    if given is not None:
        picture = _rgb(decode(given, FIELD))
        whole = source.whole if source else None
        picture = fitted(picture, whole.size if whole else size, control)
        picture = picture.resize(size, SHARP, whole.box) if whole else picture
    elif source is not None and not control.image:
        picture = source.image if source.size == size else source.image.resize(size, SHARP)
    else:
        needed = f"with {control.name!r}: needs the picture of its map"
        raise InvalidParams(FIELD, None, needed)
    if control.preprocess != CANNY:
        return picture
    edges = canny(np.array(picture), control.low, control.high)
    return Image.fromarray(edges).convert("RGB")


def fitted(picture: Image.Image, size: tuple[int, int], control: Control) -> Image.Image:
    if picture.size == size:
        return picture
    if control.resize == CROP:
        return ImageOps.fit(picture, size, SHARP)
    if control.resize == FILL:
        return ImageOps.pad(picture, size, SHARP)
    stretched = (picture.width / picture.height) / (size[0] / size[1])
    if control.resize is None and abs(stretched - 1) > TOLERANCE:
        needed = (
            f"with {control.name!r}: its map is {picture.width}x{picture.height}, the picture "
            f"{size[0]}x{size[1]}; give a map of the same proportions, or resize: crop, fill or "
            "stretch"
        )
        raise InvalidParams(FIELD, None, needed)
    return picture.resize(size, SHARP)


def _rgb(picture: Image.Image) -> Image.Image:
    """Return it without transparency, on black."""
    if picture.has_transparency_data:
        black = Image.new("RGBA", picture.size, "black")
        picture = Image.alpha_composite(black, picture.convert("RGBA"))
    return picture.convert("RGB")
