"""Renames tensors from the original layout to diffusers' layout, with diffusers' converters.

The file is refused unless each network gets exactly its tensors, in the right shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from sdxl.checkpoint_checks import CheckpointError, foreign_errors, shapes_of_network
from sdxl.single_file.recognition import CLIP_G, CLIP_L, REFINER_CLIP_G, UNET, VAE

Tensors = Mapping[str, Tensor]
Configs = Mapping[str, Mapping[str, Any]]
WRAPPER = "text_model."
"""a prefix of tensor names in some versions of transformers"""
UNUSED = ("position_ids", "logit_scale")
"""buffers of old versions and of training"""
PROJECTION = "text_projection.weight"
OLD_ATTENTION = {
    ".query.": ".to_q.",
    ".key.": ".to_k.",
    ".value.": ".to_v.",
    ".proj_attn.": ".to_out.0.",
}
"""diffusers' names of a VAE's attention, by its older ones"""


def parts_of(file: Path, tensors: Tensors, configs: Configs) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each part by folder, without `vae` if the file has none. A refiner has
    no `text_encoder`, and its VAE is not read."""
    from diffusers.loaders.single_file_utils import (
        convert_ldm_clip_checkpoint,
        convert_ldm_unet_checkpoint,
        convert_open_clip_checkpoint,
    )

    clip_g = SimpleNamespace(config=SimpleNamespace(**configs["text_encoder_2"]))
    is_refiner = "text_encoder" not in configs
    prefix = REFINER_CLIP_G if is_refiner else CLIP_G
    unet = _below(UNET, tensors)
    with foreign_errors(file):
        parts = {
            "text_encoder_2": convert_open_clip_checkpoint(clip_g, _below(prefix, tensors), prefix),
            "unet": convert_ldm_unet_checkpoint(unet, configs["unet"]),
        }
        # The converter drops what it does not know, such as an LCM's time_embed.cond_proj.
        converted = {id(tensor) for tensor in parts["unet"].values()}
        parts["unet"] |= {n: tensor for n, tensor in unet.items() if id(tensor) not in converted}
        if prefix + PROJECTION in tensors:
            # Some programs write transformers' name, for a matrix that is not transposed.
            parts["text_encoder_2"].setdefault(PROJECTION, tensors[prefix + PROJECTION])
        if not is_refiner:
            parts["text_encoder"] = convert_ldm_clip_checkpoint(_below(CLIP_L, tensors))
            # SDXL does not use the first encoder's projection.
            parts["text_encoder"].pop(PROJECTION, None)
    checked = {name: _checked_part(file, name, part, configs) for name, part in parts.items()}
    if not is_refiner and any(name.startswith(VAE) for name in tensors):
        checked["vae"] = vae_of(file, _below(VAE, tensors), configs)
    return checked


def vae_of(file: Path, tensors: Tensors, configs: Configs) -> dict[str, Tensor]:
    """Return the VAE of a whole checkpoint, of a VAE file, or of a file with diffusers' names."""
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    if any(name.startswith("decoder.up_blocks.") for name in tensors):
        return _checked_part(file, "vae", {_renewed(n): t for n, t in tensors.items()}, configs)
    with foreign_errors(file):
        converted = convert_ldm_vae_checkpoint(dict(tensors), configs["vae"])
    return _checked_part(file, "vae", converted, configs)


def _renewed(name: str) -> str:
    for old, new in OLD_ATTENTION.items():
        name = name.replace(old, new)
    return name


def _checked_part(
    file: Path, part: str, tensors: dict[str, Tensor], configs: Configs
) -> dict[str, Tensor]:
    """Remove unused tensors; every other tensor must belong to the network."""
    kept = {name: t for name, t in tensors.items() if not name.endswith(UNUSED)}
    shapes = shapes_of_network(part, configs[part])
    needed = {name.removeprefix(WRAPPER): shape for name, shape in shapes.items()}
    held = {name.removeprefix(WRAPPER): tuple(t.shape) for name, t in kept.items()}
    if missing := sorted(needed.keys() - held.keys()):
        raise CheckpointError(
            f"{file}: {part} lacks {len(missing)} tensors, {missing[0]!r} the first; expected the "
            "shape of SDXL 1.0"
        )
    if extra := sorted(held.keys() - needed.keys()):
        raise CheckpointError(
            f"{file}: {part} has {len(extra)} tensors too many, {extra[0]!r} the first; expected "
            "the shape of SDXL 1.0"
        )
    for name, shape in held.items():
        if shape != needed[name]:
            raise CheckpointError(f"{file}: {part} {name} is {shape}, expected {needed[name]}")
    return {name: tensor.contiguous() for name, tensor in kept.items()}


def _below(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
