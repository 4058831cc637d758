"""A small checkpoint in the layout of stable-diffusion-xl-1.0-inpainting-0.1: the embedded model,
whose UNet also reads a mask and the latents of the picture under it.

The weights of these inputs are random, so the pictures are not good, but depend on all inputs.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.sdxl.altered import drawn, write_altered

CHANNELS = 9
STRENGTH = 0.05
"""the strength of the random weights, which are about as large as the latents' weights"""
CONV_IN = "conv_in.weight"


def write_inpainting(folder: Path, channels: int = CHANNELS) -> Path:
    def widen(tensors: dict[str, Tensor]) -> None:
        known = tensors[CONV_IN]
        dims = known.shape[0], channels - known.shape[1], *known.shape[2:]
        tensors[CONV_IN] = torch.cat([known, drawn(dims, STRENGTH, known)], dim=1)

    return write_altered(folder, {"in_channels": channels}, widen)
