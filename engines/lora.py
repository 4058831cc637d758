"""Fuses LoRAs into a checkpoint's modules before they are exported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from engines.lora_weights import LoraError, read_lora
from sdxl.catalogue import DIFFUSERS_FILE, PEFT_CONFIG, PEFT_FILE, Catalogue
from sdxl.checkpoint import NETWORK_FOLDERS, Checkpoint
from sdxl.digests import sha256_of
from sdxl.params import InvalidParams
from sdxl.places import LORAS
from sdxl.single_file.recognition import SAFETENSORS

ADAPTED = ("unet", "text_encoder", "text_encoder_2")


@dataclass(frozen=True)
class LoraFile:
    """A LoRA's file and strength."""

    path: Path
    scale: float = 1.0

    @classmethod
    def parse(cls, text: str) -> LoraFile:
        """Read `LORA` or `LORA:SCALE`. LORA is a file, a folder with a LoRA, or the name of an
        embedded model's LoRA."""
        name, _, end = text.rpartition(":")
        try:
            lora = cls(_find_file(name), float(end)) if name else cls(_find_file(text))
        except ValueError:
            lora = cls(_find_file(text))
        if not math.isfinite(lora.scale):
            raise InvalidParams("lora", text, "must be LORA or LORA:SCALE, a finite number")
        if lora.path.suffix != SAFETENSORS:
            others = f"a folder with one, or one of {', '.join(_embedded_loras())}"
            needed = f"must be a file whose name ends in {SAFETENSORS}, {others}"
            raise InvalidParams("lora", text, needed)
        if not lora.path.is_file():
            raise InvalidParams("lora", text, "must be an existing file")
        return lora

    def as_dict(self) -> dict[str, Any]:
        files = {"sha256": self.path, "config_sha256": self.path.with_name(PEFT_CONFIG)}
        digests = {
            name: sha256_of(path)
            for name, path in files.items()
            if path == self.path or (self.path.name == PEFT_FILE and path.is_file())
        }
        return {"file": self.path.name, **digests, "scale": self.scale}


def load_parts(checkpoint: Checkpoint, loras: Sequence[LoraFile], *names: str) -> dict[str, Any]:
    """Load the named parts in float32 and fuse the LoRAs into them."""
    needed = {*names, *(ADAPTED if loras and {*names} & {*ADAPTED} else ())}
    parts = {name: checkpoint.part(name) for name in NETWORK_FOLDERS if name in needed}
    if needed & {*ADAPTED}:
        fuse(loras, parts)
    return {name: parts[name] for name in names}


def _find_file(name: str) -> Path:
    """Return the LoRA's file. An existing path precedes an embedded LoRA of the same name."""
    path = Path(name)
    for each in (path, path / DIFFUSERS_FILE, path / PEFT_FILE):
        if each.is_file():
            return each
    return _embedded_loras().get(name, path)


def _embedded_loras() -> dict[str, Path]:
    return {each.name: each.path for each in Catalogue((LORAS,)).listed("lora")}


def fuse(loras: Sequence[LoraFile], parts: Mapping[str, nn.Module]) -> None:
    """Add the LoRAs to the weights, in place and in order."""
    layers = _layers(parts)
    for lora in loras:
        try:
            changes = read_lora(lora.path, layers_of(parts))
        except LoraError as error:
            raise LoraError(f"lora {str(lora.path)!r}: {error}") from error
        for name, change in changes.items():
            weight = layers[name].weight.data
            weight += lora.scale * (change.up @ change.down).view_as(weight)


def layers_of(parts: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that a LoRA may adapt, by part and layer."""
    return {name: tuple(layer.weight.shape) for name, layer in _layers(parts).items()}


def _layers(parts: Mapping[str, nn.Module]) -> dict[str, nn.Linear | nn.Conv2d]:
    return {
        f"{part}.{name}": layer
        for part, module in parts.items()
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    }
