"""A small checkpoint in the layout of one that was distilled to read guidance, such as LCM's for
SDXL: the embedded model, whose UNet also reads an embedding of guidance.

The weights of that embedding are random: the pictures are not good, but depend on guidance.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from tests.sdxl.altered import drawn, write_altered

CHANNELS = 24
STRENGTH = 0.3
"""of the random weights: with it, guidance changes a picture about as much as another prompt"""


def write_embedding(folder: Path, channels: int = CHANNELS) -> Path:
    def add(tensors: dict[str, Tensor]) -> None:
        like = tensors["time_embedding.linear_1.weight"]
        dims = like.shape[1], channels
        tensors["time_embedding.cond_proj.weight"] = drawn(dims, STRENGTH, like)

    return write_altered(folder, {"time_cond_proj_dim": channels}, add)
