"""A small checkpoint in the layout of models that are distilled to read guidance, such as LCM's for
SDXL: the embedded model, whose UNet also reads an embedding of guidance.

The embedding's weights are random, so the pictures are not good, but depend on guidance.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from tests.sdxl.altered import drawn, write_altered

CHANNELS = 24
STRENGTH = 0.3
"""the strength of the random weights, with which guidance changes a picture about as much as
another prompt does"""


def write_embedding(folder: Path, channels: int = CHANNELS) -> Path:
    def add(tensors: dict[str, Tensor]) -> None:
        like = tensors["time_embedding.linear_1.weight"]
        dims = like.shape[1], channels
        tensors["time_embedding.cond_proj.weight"] = drawn(dims, STRENGTH, like)

    return write_altered(folder, {"time_cond_proj_dim": channels}, add)
