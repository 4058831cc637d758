"""The embedded model with another UNet, which reads more inputs through random weights."""

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


def write_altered(
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


def drawn(dims: tuple[int, ...], strength: float, like: Tensor) -> Tensor:
    """Return the same random weights each time."""
    noise = torch.randn(dims, generator=torch.Generator().manual_seed(0))
    return (noise * strength).to(like.dtype)
