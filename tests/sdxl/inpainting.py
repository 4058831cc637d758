"""A small checkpoint in the layout of stable-diffusion-xl-1.0-inpainting-0.1: the embedded model,
whose UNet also reads a mask and the latents of the picture under it.

The weights of what it reads besides are random: its pictures are not good, but depend on all of it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sdxl.checkpoint import MINI, WEIGHT_NAMES

CHANNELS = 9
STRENGTH = 0.05
"""of the random weights; those of the latents are about as large"""
CONV_IN = "conv_in.weight"


def write_inpainting(folder: Path, channels: int = CHANNELS) -> Path:
    shutil.copytree(MINI, folder)
    # They are of other weights.
    (folder / "presets.json").unlink()
    config = folder / "unet" / "config.json"
    facts = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**facts, "in_channels": channels}), encoding="utf-8")
    weights = folder / "unet" / f"{WEIGHT_NAMES['unet']}.safetensors"
    tensors = load_file(weights)
    known = tensors[CONV_IN]
    dims = known.shape[0], channels - known.shape[1], *known.shape[2:]
    more = torch.randn(dims, generator=torch.Generator().manual_seed(0)) * STRENGTH
    tensors[CONV_IN] = torch.cat([known, more.to(known.dtype)], dim=1)
    save_file(tensors, weights, {"format": "pt"})
    return folder
