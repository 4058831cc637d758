"""The inputs of a picture's image prompts: keys and values of their tokens.

It knows no networks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sdxl.adapters import ImageAdapter
from sdxl.control_maps import PICTURE, Pictures, picture_file, read_map
from sdxl.image_prompts import ImagePrompt, ImageWindow
from sdxl.params import InvalidParams

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, eq=False)
class ImageInput:
    """Pictures that rows attend to together, in one softmax."""

    window: ImageWindow
    text: tuple[Tensor, ...]
    """keys and values of every cross-attention in order, [rows, tokens, width], positive row first;
    the values are scaled by the strength"""


def image_inputs(
    prompts: Iterable[ImagePrompt], adapters: Mapping[str, ImageAdapter], pictures: Pictures
) -> tuple[ImageInput, ...]:
    """Return an input for each group of prompts. Raise InvalidParams for a wrong picture."""
    groups: dict[object, list[ImagePrompt]] = {}
    for each in prompts:
        if each.strength:
            groups.setdefault(each.group, []).append(each)
    return tuple(_input(group, adapters[group[0].name], pictures) for group in groups.values())


def _input(group: Sequence[ImagePrompt], adapter: ImageAdapter, pictures: Pictures) -> ImageInput:
    attending, first = adapter.layers[group[0].mode], group[0]
    encoded = [_encoded(each, adapter, pictures) for each in group]
    text = []
    for index, negative in enumerate(adapter.negative):
        layer, is_value = divmod(index, 2)
        parts = []
        for each, positive in zip(group, encoded, strict=True):
            share = each.strength if layer in attending else 0.0
            rows = torch.cat([positive[index], negative])
            parts.append(rows * share if is_value else rows)
        text.append(torch.cat(parts, 1))
    return ImageInput(ImageWindow(first.start, first.end, text[0].shape[1]), tuple(text))


def _encoded(prompt: ImagePrompt, adapter: ImageAdapter, pictures: Pictures) -> Sequence[Tensor]:
    data = picture_file(prompt, pictures)
    try:
        return adapter.encode(data)
    except InvalidParams as error:
        raise prompt.refused(error) from None


def pixels_of(data: bytes, side: int) -> Tensor:
    """Return the middle of the picture as [1, 3, side, side] for CLIP's encoder. Raise
    InvalidParams for a wrong file."""
    picture = read_map(data, PICTURE)
    scale = side / min(picture.size)
    width, height = (max(int(length * scale), side) for length in picture.size)
    sized = picture.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - side) // 2, (height - side) // 2
    colours = np.array(sized.crop((left, top, left + side, top + side)), np.float32) / 255
    normed = (torch.from_numpy(colours) - torch.tensor(CLIP_MEAN)) / torch.tensor(CLIP_DEVIATION)
    return normed.movedim(-1, 0)[None].contiguous()
