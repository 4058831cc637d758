"""Image adapters of requests. They run in PyTorch beside every backend, once for each picture."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from engines.image_weights import ImageFile, read_image_adapter
from engines.net_shelf import Make, NetShelf, room_on
from sdxl.adapters import ImageAdapter
from sdxl.checkpoint import Checkpoint
from sdxl.image_inputs import pixels_of

KEPT_PICTURES = 8
"""pictures whose keys and values an adapter keeps"""


def image_shelf(
    checkpoint: Checkpoint, dtype: str, device: torch.device
) -> NetShelf[ImageFile, ImageAdapter]:
    """Return a shelf of image adapters. Adapters with the same encoder share it."""
    encoders: WeakValueDictionary[Path, nn.Module] = WeakValueDictionary()
    number = getattr(torch, dtype)

    def load(file: ImageFile) -> Make[ImageAdapter]:
        vision = encoders.get(file.encoder)
        if vision is None:
            vision = encoders[file.encoder] = file.vision()
        network: Any = file.network(vision).to(device, number)

        # The pictures of one request have the same image prompts.
        @lru_cache(maxsize=KEPT_PICTURES)
        @torch.inference_mode()
        def encode(data: bytes) -> tuple[Tensor, ...]:
            result: tuple[Tensor, ...] = network(pixels_of(data, file.side).to(device, number))
            return result

        with torch.inference_mode():
            black = torch.zeros(1, checkpoint.arch.image_channels, file.side, file.side)
            negative = network.without(black.to(device, number))
        return partial(ImageAdapter, encode=encode, negative=negative, layers=file.layers)

    return NetShelf(checkpoint, read_image_adapter, load, *room_on(device, dtype))
