"""IP-Adapters with random weights for the embedded model, in the files that h94/IP-Adapter has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from sdxl.checkpoint import find
from sdxl.networks.attention import cross_attentions

SIDE, HIDDEN, PROJECTED = 32, 48, 24
"""the encoder's sizes: pictures, layers and embeddings"""
PLAIN, PLUS = "ip-adapter_sdxl", "ip-adapter-plus_sdxl_vit-h"
TOKENS = {PLAIN: 4, PLUS: 16}


def write_adapters(folder: Path) -> Path:
    """Write both kinds of adapters and their encoder."""
    save_file(plain_tensors(1), folder / f"{PLAIN}.safetensors")
    save_file(plus_tensors(2), folder / f"{PLUS}.safetensors")
    random_encoder().save_pretrained(folder / "image_encoder")
    return folder


def random_encoder(projected: int = PROJECTED) -> Any:
    config = CLIPVisionConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        projection_dim=projected,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=8,
    )
    torch.manual_seed(5)
    model = CLIPVisionModelWithProjection(config)
    for parameter in model.parameters():
        # With the initial weights, pictures hardly differ.
        parameter.data.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return model.eval()


def plain_tensors(seed: int) -> dict[str, Tensor]:
    context = find("mini").arch.context_width
    random = _Random(seed)
    return {
        "image_proj.proj.weight": random(4 * context, PROJECTED),
        "image_proj.proj.bias": random(4 * context),
        **random.norm("image_proj.norm", context),
        **attention_tensors(random),
    }


def plus_tensors(seed: int) -> dict[str, Tensor]:
    context = find("mini").arch.context_width
    width, layers, heads = 40, 4, 2
    random = _Random(seed)
    made = {
        "latents": random(1, TOKENS[PLUS], width),
        "proj_in.weight": random(width, HIDDEN),
        "proj_in.bias": random(width),
        "proj_out.weight": random(context, width),
        "proj_out.bias": random(context),
        **random.norm("norm_out", context),
    }
    for number in range(layers):
        attention, rise = f"layers.{number}.0", f"layers.{number}.1"
        made |= random.norm(f"{attention}.norm1", width) | random.norm(f"{attention}.norm2", width)
        made |= {
            f"{attention}.to_q.weight": random(heads * 64, width),
            f"{attention}.to_kv.weight": random(2 * heads * 64, width),
            f"{attention}.to_out.weight": random(width, heads * 64),
            **random.norm(f"{rise}.0", width),
            f"{rise}.1.weight": random(4 * width, width),
            f"{rise}.3.weight": random(width, 4 * width),
        }
    return {f"image_proj.{n}": t for n, t in made.items()} | attention_tensors(random)


def attention_tensors(random: _Random) -> dict[str, Tensor]:
    """Tensors in the order of diffusers' attention processors: down, up, middle."""
    unet: Any = find("mini").part("unet")
    context = find("mini").arch.context_width
    widths = {id(each): each.to_k.out_features for each in cross_attentions(unet)}
    in_file = [
        module
        for blocks in (unet.down_blocks, unet.up_blocks, unet.mid_block)
        for module in blocks.modules()
        if id(module) in widths
    ]
    made = {}
    for number, module in enumerate(in_file):
        for side in "kv":
            name = f"ip_adapter.{2 * number + 1}.to_{side}_ip.weight"
            made[name] = random(widths[id(module)], context) * (2 if side == "k" else 8)
    return made


class _Random:
    """Random normal weights that preserve the size of their inputs."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *dims: int) -> Tensor:
        scale = dims[-1] ** -0.5 if len(dims) == 2 else 0.3
        return torch.randn(dims, generator=self.generator) * scale

    def norm(self, name: str, width: int) -> dict[str, Tensor]:
        return {f"{name}.weight": 1 + self(width), f"{name}.bias": self(width)}
