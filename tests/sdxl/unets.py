"""SDXL-shaped UNets with random weights, in small sizes."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor

from sdxl.specs import Architecture, Cut, network_specs

TOPOLOGY: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 2,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "in_channels": 4,
    "out_channels": 4,
}


def sizes_of(
    widths: tuple[int, int, int],
    depths: tuple[int, int, int],
    heads: tuple[int, int, int],
    context: int,
    pooled: int,
    time: int,
    side: int,
    groups: int = 32,
) -> dict[str, Any]:
    return {
        "block_out_channels": widths,
        "transformer_layers_per_block": depths,
        "attention_head_dim": heads,
        "cross_attention_dim": context,
        "addition_time_embed_dim": time,
        "projection_class_embeddings_input_dim": pooled + 6 * time,
        "norm_num_groups": groups,
        "sample_size": side,
    }


SIZES = {
    "mini": sizes_of((32, 64, 96), (1, 1, 2), (2, 4, 6), 128, 64, 32, 16, groups=16),
    "mid": sizes_of((64, 128, 256), (1, 2, 4), (2, 4, 8), 256, 128, 64, 32),
    "full": sizes_of((320, 640, 1280), (1, 2, 10), (5, 10, 20), 2048, 1280, 256, 128),
}


def random_unet(size: str) -> UNet2DConditionModel:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(**TOPOLOGY, **SIZES[size])
    return unet.eval().requires_grad_(False)


def architecture(size: str) -> Architecture:
    sizes = SIZES[size]
    pooled = sizes["projection_class_embeddings_input_dim"] - 6 * sizes["addition_time_embed_dim"]
    width = sizes["cross_attention_dim"]
    return Architecture.from_configs(
        {**TOPOLOGY, **sizes},
        {"out_channels": 3, "latent_channels": 4, "block_out_channels": [1, 1, 1, 1]},
        {"hidden_size": width // 2},
        {"hidden_size": width - width // 2, "projection_dim": pooled},
    )


def random_inputs(
    size: str, rows: int, h: int, w: int, cut: Cut = "reference", tokens: int = 77
) -> dict[str, Tensor]:
    """Return Deep's inputs, seeded, with a different timestep in each row."""
    inputs = _random("unet_deep", size, rows, h, w, cut, tokens)
    return inputs | {"timestep": torch.linspace(999.0, 1.5, rows)}


def random_prompt(size: str, rows: int, h: int, w: int, tokens: int = 77) -> dict[str, Tensor]:
    """Return the encoding of a prompt and of a picture's size, seeded."""
    inputs = _random("unet_prompt", size, rows, h, w, "reference", tokens)
    time_ids = torch.tensor([[h * 8.0, w * 8.0, 0, 0, h * 8.0, w * 8.0]] * rows)
    return inputs | {"time_ids": time_ids}


def _random(
    network: str, size: str, rows: int, h: int, w: int, cut: Cut, tokens: int
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + h * 10 + w)
    axes = {"rows": rows, "latent_h": h, "latent_w": w, "tokens": tokens}
    spec = network_specs(architecture(size), cut=cut)[network]
    return {t.name: torch.randn(t.shape(axes), generator=generator) for t in spec.inputs}
