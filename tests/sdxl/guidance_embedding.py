"""A small checkpoint in the layout of one that was distilled to read guidance, such as LCM's for
SDXL: the embedded model, whose UNet also reads an embedding of guidance.

The weights of what it reads besides are random: its pictures are not good, but depend on guidance.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sdxl.checkpoint import MINI, WEIGHT_NAMES

CHANNELS = 24
STRENGTH = 0.3
"""of the random weights: guidance then moves a picture about as much as another prompt"""


def write_embedding(folder: Path, channels: int = CHANNELS) -> Path:
    shutil.copytree(MINI, folder)
    # They are of other weights.
    (folder / "presets.json").unlink()
    config = folder / "unet" / "config.json"
    facts = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**facts, "time_cond_proj_dim": channels}), encoding="utf-8")
    weights = folder / "unet" / f"{WEIGHT_NAMES['unet']}.safetensors"
    tensors = load_file(weights)
    dims = facts["block_out_channels"][0], channels
    drawn = torch.randn(dims, generator=torch.Generator().manual_seed(0)) * STRENGTH
    like = tensors["time_embedding.linear_1.weight"]
    tensors["time_embedding.cond_proj.weight"] = drawn.to(like.dtype)
    save_file(tensors, weights, {"format": "pt"})
    return folder
