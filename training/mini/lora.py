"""Low-rank changes (LoRA) of a UNet's weights: trained, and written in other libraries' layouts.

Hu et al. 2021 (arXiv 2106.09685). A weight is the original plus the product of two thin matrices.
Only these are trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sdxl.catalogue import DIFFUSERS_FILE, PEFT_CONFIG, PEFT_FILE, PEFT_PREFIX
from sdxl.files import grant_usual, write_json
from sdxl.places import LORAS
from sdxl.single_file.recognition import SAFETENSORS

KOHYA = {"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}


class LowRankChange(nn.Module):
    """A low-rank change of a weight. It begins at zero."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        out_size, in_size = weight.flatten(1).shape
        self.down = nn.Parameter(torch.empty(rank, in_size))
        self.up = nn.Parameter(torch.zeros(out_size, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.up @ self.down).view_as(weight)


def add_low_rank(network: nn.Module, rank: int, within: str = "") -> None:
    """Freeze the network, and add low-rank changes to every linear layer and convolution with
    `within` in its name."""
    network.requires_grad_(False)
    for name, layer in list(network.named_modules()):
        if isinstance(layer, nn.Linear | nn.Conv2d) and within in name:
            parametrize.register_parametrization(layer, "weight", LowRankChange(layer.weight, rank))


def add_lora(pipe: Any, name: str) -> None:
    """Load a LoRA of the package into diffusers' pipeline, with the library of its format."""
    folder = LORAS / name
    if (folder / PEFT_FILE).exists():
        from peft import PeftModel

        pipe.unet = PeftModel.from_pretrained(pipe.unet, folder).merge_and_unload()
    else:
        pipe.load_lora_weights(folder if folder.exists() else folder.with_suffix(SAFETENSORS))


def low_rank_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return the matrices by layer and peft's names. A convolution's `lora_A` has its kernel."""
    tensors = {}
    for name, layer in network.named_modules():
        if not parametrize.is_parametrized(layer, "weight"):
            continue
        change = layer.parametrizations["weight"][0]
        up, down = change.up, change.down
        if isinstance(layer, nn.Conv2d):
            up, down = up[..., None, None], down.unflatten(1, layer.weight.shape[1:])
        tensors[f"{name}.lora_A.weight"] = down.detach().half().contiguous()
        tensors[f"{name}.lora_B.weight"] = up.detach().half().contiguous()
    return tensors


def write_in_diffusers_layout(network: nn.Module, folder: Path) -> None:
    tensors = {f"unet.{name}": tensor for name, tensor in low_rank_tensors(network).items()}
    _write(tensors, folder, DIFFUSERS_FILE)


def write_in_peft_layout(network: nn.Module, folder: Path, rank: int) -> None:
    tensors = low_rank_tensors(network)
    layers = sorted({name.rpartition(".lora_")[0] for name in tensors})
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": layers,
        "inference_mode": True,
    }
    _write({f"{PEFT_PREFIX}{n}": t for n, t in tensors.items()}, folder, PEFT_FILE)
    write_json(folder / PEFT_CONFIG, config, indent=2)


def write_in_kohya_layout(parts: Mapping[str, nn.Module], path: Path, rank: int) -> None:
    """Write the changes of several parts. Alpha is half the rank, as is usual in this layout."""
    alpha = rank / 2
    tensors = {}
    for part, network in parts.items():
        for name, tensor in low_rank_tensors(network).items():
            layer, _, side = name.removesuffix(".weight").rpartition(".lora_")
            is_short = part != "unet" and not layer.startswith("text_model.")
            key = f"{KOHYA[part]}_{'text_model.' if is_short else ''}{layer}".replace(".", "_")
            tensors[f"{key}.alpha"] = torch.tensor(alpha).half()
            if side == "A":
                tensors[f"{key}.lora_down.weight"] = tensor
            else:
                tensors[f"{key}.lora_up.weight"] = tensor * (rank / alpha)
    _write(tensors, path.parent, path.name)


def _write(tensors: dict[str, Tensor], folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name, metadata={"format": "pt"})
    grant_usual(folder / name)
