"""Recognises the model in a single file by its tensors' names and shapes, and refuses other models
than SDXL with their name.

It reads only headers and converts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sdxl.checkpoint_checks import CheckpointError

PICKLES = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
SAFETENSORS = ".safetensors"
UNET, VAE = "model.diffusion_model.", "first_stage_model."
CLIP_L, CLIP_G = "conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."
REFINER = "the SDXL refiner"
AS_REFINER = "expected a checkpoint of SDXL, and the refiner beside it, as --refiner"
REFINER_CLIP_G = "conditioner.embedders.0.model."
"""prefix of a refiner's only text encoder"""
STEM = f"{UNET}input_blocks.0.0.weight"
LATENT_CHANNELS = 4
INPUTS = (LATENT_CHANNELS, 2 * LATENT_CHANNELS + 1)
"""input channels of a UNet; the second is for inpainting"""
FLOATS = ("F32", "F16", "BF16")
PREFIXES = {
    "FLUX": ("double_blocks.0.", f"{UNET}double_blocks.0."),
    "Stable Diffusion 3": ("joint_blocks.0.", f"{UNET}joint_blocks.0."),
    "a ControlNet": ("control_model.", "controlnet_cond_embedding."),
    REFINER: (REFINER_CLIP_G,),
    "Stable Diffusion 2": ("cond_stage_model.model.",),
    "Stable Diffusion 1": ("cond_stage_model.transformer.",),
    "Playground 2.5, whose noise process no table here expresses": ("edm_mean", "edm_vpred."),
}
"""Tensor prefixes of other models, checked in order."""
CONTEXT_WIDTHS = {768: "Stable Diffusion 1", 1024: "Stable Diffusion 2", 1280: REFINER}
"""the model of a UNet without text encoders, by its context's width"""
FOREIGN_INPUTS = {8: "an InstructPix2Pix checkpoint"}


@dataclass(frozen=True)
class Header:
    """A safetensors file without its weights."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    types: frozenset[str]
    metadata: Mapping[str, str]

    def has(self, *prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in self.shapes)


def read_header(path: Path) -> Header:
    from safetensors import SafetensorError, safe_open

    check_suffix(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: not found; must be a {SAFETENSORS} file")
    try:
        # Only the header is read, and PyTorch takes seconds to import.
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            types = frozenset(
                part.get_dtype() for name, part in slices.items() if name.startswith((UNET, VAE))
            )
            return Header(path, shapes, types, file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error})") from error


def check_suffix(path: Path) -> None:
    if path.suffix.lower() in PICKLES:
        raise CheckpointError(
            f"{path}: pickle weights can run code and are refused; expected a {SAFETENSORS} file"
        )
    if path.suffix.lower() != SAFETENSORS:
        raise CheckpointError(
            f"{path}: not a checkpoint; expected a {SAFETENSORS} file or a folder"
        )


def check_is_sdxl(header: Header) -> None:
    """Raise CheckpointError for another model, with its name, or an incomplete file."""
    other = foreign_kind(header)
    if other == REFINER:
        raise CheckpointError(f"{header.path}: is {other}; {AS_REFINER}")
    if other:
        raise CheckpointError(f"{header.path}: is {other}; expected a checkpoint of SDXL")
    parts = ("UNet", UNET), ("first encoder", CLIP_L), ("second encoder", CLIP_G)
    _check_whole(header, parts, "SDXL")


def check_is_refiner(header: Header) -> None:
    other = foreign_kind(header)
    if other != REFINER:
        raise CheckpointError(f"{header.path}: is {other or 'SDXL'}; expected {REFINER}")
    _check_whole(header, (("UNet", UNET), ("text encoder", REFINER_CLIP_G)), "SDXL's refiner")


def _check_whole(header: Header, parts: Iterable[tuple[str, str]], kind: str) -> None:
    if missing := [name for name, prefix in parts if not header.has(prefix)]:
        raise CheckpointError(
            f"{header.path}: holds no {', no '.join(missing)}; expected a whole checkpoint of "
            f"{kind}"
        )
    if strange := sorted(header.types - {*FLOATS}):
        raise CheckpointError(
            f"{header.path}: holds weights in {strange[0]}; expected one of {', '.join(FLOATS)}"
        )


def check_has_vae(header: Header) -> None:
    if not header.has(VAE):
        raise CheckpointError(f"{header.path}: holds no VAE; give --vae FILE")


def foreign_kind(header: Header) -> str | None:
    """Return the other model's name; None for SDXL or a part of SDXL."""
    if any(".lora_" in name or name.startswith("lora_") for name in header.shapes):
        return "a LoRA, which `sdxl export --lora` takes beside a checkpoint"
    for kind, prefixes in PREFIXES.items():
        if header.has(*prefixes):
            return kind
    return _kind_of_unet(header) if header.has(UNET) else _kind_by_diffusers(header)


def _kind_of_unet(header: Header) -> str | None:
    channels = input_channels(header)
    if channels not in INPUTS:
        known = FOREIGN_INPUTS.get(channels, "a checkpoint")
        needed = " or ".join(map(str, INPUTS))
        return f"{known} with {channels} input channels instead of {needed}"
    for name, shape in header.shapes.items():
        if name.endswith("attn2.to_k.weight"):
            return CONTEXT_WIDTHS.get(shape[1])
    return _kind_by_diffusers(header)


def input_channels(header: Header) -> int:
    """Return the UNet's input channels; SDXL's if there is no UNet."""
    stem = header.shapes.get(STEM, ())
    return stem[1] if len(stem) == 4 else LATENT_CHANNELS


def _kind_by_diffusers(header: Header) -> str | None:
    """Look the model up in diffusers' table of forty models."""
    if header.has(VAE, CLIP_L, CLIP_G):
        return None
    if header.has("decoder.") and header.has("encoder."):
        return "a VAE alone, which --vae takes beside a checkpoint"
    from diffusers.loaders.single_file_utils import CHECKPOINT_KEY_NAMES

    for kind, keys in CHECKPOINT_KEY_NAMES.items():
        if header.shapes.keys() & ({keys} if isinstance(keys, str) else {*keys}):
            return f"{kind!r}, as diffusers calls it"
    return "nothing that is known"
