"""A small checkpoint in the layout of SDXL's refiner: the embedded model's second text encoder, and
a UNet of four levels with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

from sdxl.checkpoint import MINI
from sdxl.single_file.configs import REFINER_1_0, REFINER_INDEX

SHARED = ("scheduler", "text_encoder_2", "tokenizer_2", "vae")
WIDTH, TIME = 64, 32
"""the widths of the text and of a time id's embedding"""


def write_refiner(folder: Path) -> Path:
    for name in SHARED:
        shutil.copytree(MINI / name, folder / name)
    index = json.loads((MINI / "model_index.json").read_text(encoding="utf-8"))
    index |= {**REFINER_INDEX, "force_zeros_for_empty_prompt": False}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    random_unet().save_pretrained(folder / "unet")
    return folder


def random_unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    sizes = {
        "sample_size": 16,
        "block_out_channels": (16, 32, 48, 48),
        "transformer_layers_per_block": 2,
        "attention_head_dim": (2, 4, 6, 6),
        "norm_num_groups": 8,
        "cross_attention_dim": WIDTH,
        "addition_time_embed_dim": TIME,
        "projection_class_embeddings_input_dim": WIDTH + 5 * TIME,
    }
    unet = UNet2DConditionModel(**{**REFINER_1_0["unet"], **sizes})
    return unet.eval().requires_grad_(False)
