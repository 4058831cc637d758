"""The original layout of SDXL checkpoints, written from a folder in diffusers layout.

The names are those of Stability's generative-models. They are listed here independently of the code
under test and of diffusers' converters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdxl.checkpoint import Checkpoint

UNET, VAE = "model.diffusion_model.", "first_stage_model."
CLIP_L, CLIP_G = "conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."
REFINER_CLIP_G = "conditioner.embedders.0.model."

UNET_PLAIN = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
VAE_ATTENTION = {
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
}
CLIP_G_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}


def write_single_file(
    folder: Path,
    file: Path,
    dtype: torch.dtype | None = None,
    without: Iterable[str] = (),
    more: Mapping[str, Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a folder's four networks into one file, as on Civitai, in `dtype` if given."""
    tensors: dict[str, Tensor] = {}
    for part, rename in RENAMED.items():
        if part not in without:
            tensors |= rename(_weights(folder / part))
    halves = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return saved({**halves, **(more or {})}, file, {"format": "pt", **(metadata or {})})


def write_refiner_file(folder: Path, file: Path) -> Path:
    """Write a refiner's networks into one file, as Stability AI published it."""
    tensors = original_clip_g(_weights(folder / "text_encoder_2"), REFINER_CLIP_G)
    tensors |= original_unet(_weights(folder / "unet"), ("1", "2"))
    return saved(tensors | original_vae(_weights(folder / "vae")), file)


def write_vae_alone(folder: Path, file: Path) -> Path:
    return saved(original_vae(_weights(folder / "vae"), prefix=""), file)


def saved(
    tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None = None
) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata)
    return file


def assert_same_weights(
    found: Checkpoint, needed: Checkpoint, dtype: torch.dtype | None = None
) -> None:
    """`dtype`: the type of the weights that are found; by default those of the needed ones."""
    for part in found.parts:
        (kept,), (whole,) = (map(load_file, each.weight_files(part)) for each in (found, needed))
        assert kept.keys() == whole.keys()
        assert all(torch.equal(kept[name], whole[name].to(dtype)) for name in whole)


def original_unet(
    tensors: Mapping[str, Tensor], attended: Collection[str] = ("0", "1")
) -> dict[str, Tensor]:
    """`attended`: the numbers of the levels on the way up that have attention."""
    return {UNET + _unet_name(name, attended): tensor for name, tensor in tensors.items()}


def _unet_name(name: str, attended: Collection[str]) -> str:
    plain, _, kind = name.rpartition(".")
    if plain in UNET_PLAIN:
        return f"{UNET_PLAIN[plain]}.{kind}"
    if match := re.match(r"mid_block\.(resnets|attentions)\.(\d)\.(.+)", name):
        layers, number, rest = match.groups()
        place = 1 if layers == "attentions" else 2 * int(number)
        return f"middle_block.{place}.{_inner(layers, rest)}"
    match = re.match(r"(down|up)_blocks\.(\d)\.(\w+)\.(\d)\.(.+)", name)
    assert match, name
    way, level, layers, number, rest = match.groups()
    i, j = int(level), int(number)
    if layers == "downsamplers":
        return f"input_blocks.{3 * (i + 1)}.0.op.{rest.removeprefix('conv.')}"
    if layers == "upsamplers":
        # After the resnet, and after the attention if the level has attention.
        return f"output_blocks.{3 * i + 2}.{2 if level in attended else 1}.{rest}"
    place = 1 if layers == "attentions" else 0
    block = f"input_blocks.{3 * i + j + 1}" if way == "down" else f"output_blocks.{3 * i + j}"
    return f"{block}.{place}.{_inner(layers, rest)}"


def _inner(layers: str, rest: str) -> str:
    layer, _, kind = rest.rpartition(".")
    return f"{RESNET[layer]}.{kind}" if layers == "resnets" else rest


def original_vae(tensors: Mapping[str, Tensor], prefix: str = VAE) -> dict[str, Tensor]:
    levels = 1 + max(int(n.split(".")[2]) for n in tensors if n.startswith("encoder.down_blocks."))
    return {prefix + _vae_name(n, levels): _as_conv(n, t) for n, t in tensors.items()}


def _vae_name(name: str, levels: int) -> str:
    name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    name = name.replace("downsamplers.0", "downsample").replace("upsamplers.0", "upsample")
    name = re.sub(r"down_blocks\.(\d)\.", r"down.\1.", name)
    name = re.sub(r"up_blocks\.(\d)\.", lambda m: f"up.{levels - 1 - int(m[1])}.", name)
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
    name = name.replace("resnets.", "block.")
    if "mid_block.attentions.0." in name:
        for theirs, ours in VAE_ATTENTION.items():
            name = name.replace(f"attentions.0.{theirs}.", f"attentions.0.{ours}.")
        name = name.replace("mid_block.attentions.0.", "mid.attn_1.")
    return name


def _as_conv(name: str, tensor: Tensor) -> Tensor:
    is_linear = "attentions" in name and name.endswith(".weight") and tensor.dim() == 2
    return tensor[:, :, None, None] if is_linear else tensor


def original_clip_l(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    count = tensors["text_model.embeddings.position_embedding.weight"].shape[0]
    ids = {"text_model.embeddings.position_ids": torch.arange(count)[None]}
    return {CLIP_L + name: tensor for name, tensor in {**tensors, **ids}.items()}


def original_clip_g(tensors: Mapping[str, Tensor], prefix: str = CLIP_G) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {"logit_scale": torch.tensor(4.6)}
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := re.match(r"text_model\.encoder\.layers\.(\d+)\.(.+)", name):
            layers.setdefault(match[1], {})[match[2]] = tensor
    for number, layer in layers.items():
        block = f"transformer.resblocks.{number}"
        for kind in ("weight", "bias"):
            joined = torch.cat([layer[f"self_attn.{x}_proj.{kind}"] for x in "qkv"])
            made[f"{block}.attn.in_proj_{kind}"] = joined
            for theirs, ours in CLIP_G_LAYER.items():
                made[f"{block}.{ours}.{kind}"] = layer[f"{theirs}.{kind}"]
    made["positional_embedding"] = tensors["text_model.embeddings.position_embedding.weight"]
    made["token_embedding.weight"] = tensors["text_model.embeddings.token_embedding.weight"]
    for kind in ("weight", "bias"):
        made[f"ln_final.{kind}"] = tensors[f"text_model.final_layer_norm.{kind}"]
    made["text_projection"] = tensors["text_projection.weight"].T
    return {prefix + name: tensor for name, tensor in made.items()}


def _weights(part: Path) -> dict[str, Tensor]:
    return {name: t for path in part.glob("*.safetensors") for name, t in load_file(path).items()}


RENAMED: Mapping[str, Callable[[Mapping[str, Tensor]], dict[str, Tensor]]] = {
    "text_encoder": original_clip_l,
    "text_encoder_2": original_clip_g,
    "unet": original_unet,
    "vae": original_vae,
}
