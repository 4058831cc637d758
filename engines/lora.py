"""LoRA files (kohya's, diffusers' or peft's), fused into a checkpoint's modules before export.

diffusers and peft read and apply them. They skip what they do not recognise; here that is an error,
so that a file is used wholly or not at all. It does not know what is exported.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from sdxl.checkpoint import NETWORK_FOLDERS, Checkpoint, quiet_loading
from sdxl.digests import sha256_of
from sdxl.mini.lora import DIFFUSERS_FILE, LORAS, PEFT_CONFIG, PEFT_FILE, PEFT_PREFIX
from sdxl.params import InvalidParams

SUFFIX = ".safetensors"
ADAPTED = ("unet", "text_encoder", "text_encoder_2")
OTHER_KINDS = ("dora_scale", "hada_", "lokr_", "oft_")


class LoraError(RuntimeError):
    """A LoRA file cannot be applied to the model: which, and why."""


@dataclass(frozen=True)
class LoraFile:
    """A file, and how strongly it is applied."""

    path: Path
    scale: float = 1.0

    @classmethod
    def parse(cls, text: str) -> LoraFile:
        """`LORA` or `LORA:SCALE`; LORA is a file, a folder with one, or the name of one of ours."""
        name, _, end = text.rpartition(":")
        try:
            lora = cls(_file_of(name), float(end)) if name else cls(_file_of(text))
        except ValueError:
            lora = cls(_file_of(text))
        if not math.isfinite(lora.scale):
            raise InvalidParams("lora", text, "must be LORA or LORA:SCALE, a finite number")
        if lora.path.suffix != SUFFIX:
            ours = ", ".join(sorted(folder.name for folder in LORAS.iterdir()))
            needed = (
                f"must be a file whose name ends in {SUFFIX}, a folder with one, or one of {ours}"
            )
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


def _file_of(name: str) -> Path:
    """An existing path takes precedence over one of our LoRAs."""
    for folder in (Path(name), LORAS / name):
        for file in (DIFFUSERS_FILE, PEFT_FILE):
            if (folder / file).is_file():
                return folder / file
    return Path(name)


def fuse(loras: Sequence[LoraFile], parts: Mapping[str, nn.Module]) -> None:
    """Add them to the weights, in place and in order."""
    for lora in loras:
        with _in_one_line(lora), quiet_loading(), _silence_logging():
            _apply(lora, parts)


def _apply(lora: LoraFile, parts: Mapping[str, nn.Module]) -> None:
    from diffusers.loaders import StableDiffusionXLLoraLoaderMixin as Loader
    from diffusers.utils.peft_utils import recurse_remove_peft_layers
    from safetensors import safe_open

    with safe_open(lora.path, framework="pt") as file:
        foreign = [key for key in file.keys() if any(kind in key for kind in OTHER_KINDS)]  # noqa: SIM118
    if foreign:
        raise LoraError(f"{foreign[0]!r} is of another kind of adapter; expected plain LoRA")
    state, alphas, metadata = Loader.lora_state_dict(
        str(lora.path), unet_config=parts["unet"].config, return_lora_metadata=True
    )
    state, alphas = _renamed(state), alphas and _renamed(alphas)
    if any(key.startswith(PEFT_PREFIX) for key in state):
        state = {key.replace(PEFT_PREFIX, "unet.", 1): value for key, value in state.items()}
        metadata = _peft_config(lora.path.with_name(PEFT_CONFIG))
    for name in ADAPTED:
        layers = {key.removeprefix(f"{name}.") for key in state if key.startswith(f"{name}.")}
        if not layers:
            continue
        module: Any = parts[name]
        if name == "unet":
            Loader.load_lora_into_unet(state, alphas, module, metadata=metadata)
        else:
            Loader.load_lora_into_text_encoder(
                state, alphas, module, prefix=name, metadata=metadata
            )
        _merge(module, {_layer(key) for key in layers}, lora.scale)
        recurse_remove_peft_layers(module)
        del module.peft_config
        module._hf_peft_config_loaded = None
    unknown = [key for key in state if key.partition(".")[0] not in ADAPTED]
    if unknown or not state:
        found = f"{unknown[0]!r}" if unknown else "nothing"
        raise LoraError(f"found {found}; needed LoRA weights of a UNet or text encoder")


def _peft_config(path: Path) -> dict[str, Any]:
    """Read the configuration, with alpha, that peft keeps beside its file."""
    from peft import LoraConfig

    if not path.is_file():
        raise LoraError(f"{path.name} is not beside it, which says how strong it is")
    config = LoraConfig.from_pretrained(str(path.parent)).to_dict()
    return {f"unet.{name}": value for name, value in config.items()}


def _merge(module: nn.Module, expected: set[str], scale: float) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = {n: m for n, m in module.named_modules() if isinstance(m, BaseTunerLayer)}
    missed = expected - {_layer(name) for name in adapted}
    if missed:
        raise LoraError(f"{len(missed)} of its layers are not in the model, {min(missed)!r} one")
    for layer in adapted.values():
        layer.scale_layer(scale)
        layer.merge()


def _renamed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Give the text encoders' attention diffusers' current names, which it converts to only if a
    file adapts `out_proj` too."""
    return {
        re.sub(r"(?<=self_attn)\.to_(q|k|v|out)_lora\.", r".\1_proj.lora_linear_layer.", key): value
        for key, value in state.items()
    }


def _layer(key: str) -> str:
    """The adapted layer of a key or module name, without the parts that only some versions
    write."""
    layer = re.split(r"[._]lora|\.alpha", key)[0].replace(".processor.", ".")
    return layer.removeprefix("text_model.").removesuffix(".0")


@contextmanager
def _silence_logging() -> Iterator[None]:
    """Silence diffusers' log: it raises the same errors."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def _in_one_line(lora: LoraFile) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        line = " ".join(str(error).split())[:300]
        raise LoraError(f"lora {str(lora.path)!r}: {line}") from error
