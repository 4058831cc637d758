"""Small checkpoints: the embedded model with another UNet, which reads more inputs.

The weights of these inputs are random, so the pictures are not good, but depend on all inputs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdxl.checkpoint import MINI, WEIGHT_NAMES

EMBEDDED, EMBEDDED_STRENGTH = 24, 0.3
"""channels and strength of the guidance embedding's weights, with which guidance changes a picture
about as much as another prompt does"""
MASKED, MASKED_STRENGTH = 9, 0.05
"""channels of an inpainting UNet; strength of the new weights, about as large as the latents'"""


def write_embedding(folder: Path) -> Path:
    """Write a checkpoint in the layout of models that are distilled to read guidance, such as LCM's
    for SDXL."""

    def add(tensors: dict[str, Tensor]) -> None:
        like = tensors["time_embedding.linear_1.weight"]
        dims = like.shape[1], EMBEDDED
        tensors["time_embedding.cond_proj.weight"] = _drawn(dims, EMBEDDED_STRENGTH, like)

    return _write_altered(folder, {"time_cond_proj_dim": EMBEDDED}, add)


def write_inpainting(folder: Path, channels: int = MASKED) -> Path:
    """Write a checkpoint in the layout of stable-diffusion-xl-1.0-inpainting-0.1, whose UNet also
    reads a mask and the latents of the picture under it."""

    def widen(tensors: dict[str, Tensor]) -> None:
        known = tensors["conv_in.weight"]
        dims = known.shape[0], channels - known.shape[1], *known.shape[2:]
        new = _drawn(dims, MASKED_STRENGTH, known)
        tensors["conv_in.weight"] = torch.cat([known, new], dim=1)

    return _write_altered(folder, {"in_channels": channels}, widen)


def _write_altered(
    folder: Path, facts: dict[str, Any], change: Callable[[dict[str, Tensor]], None]
) -> Path:
    """`facts` are added to the UNet's configuration. `change` gets the weights by name."""
    shutil.copytree(MINI, folder)
    # The presets belong to other weights.
    (folder / "presets.json").unlink()
    config = folder / "unet" / "config.json"
    whole = json.loads(config.read_text(encoding="utf-8")) | facts
    config.write_text(json.dumps(whole), encoding="utf-8")
    weights = folder / "unet" / f"{WEIGHT_NAMES['unet']}.safetensors"
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights, {"format": "pt"})
    return folder


def _drawn(dims: tuple[int, ...], strength: float, like: Tensor) -> Tensor:
    """Return the same random weights each time."""
    noise = torch.randn(dims, generator=torch.Generator().manual_seed(0))
    return (noise * strength).to(like.dtype)
