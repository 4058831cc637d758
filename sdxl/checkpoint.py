"""A Stable Diffusion XL checkpoint in diffusers layout: configs, tokenizers and networks.

Configs and tokenizers are read without diffusers and transformers, so that compiled engines start
quickly. Weights are read only from safetensors: pickles can run code and are refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdxl.arguments import VAE_MARK
from sdxl.checkpoint_checks import CheckpointError as CheckpointError
from sdxl.checkpoint_checks import check_network, count_numbers, foreign_errors, network_class
from sdxl.digests import sha256_of
from sdxl.hub import WEIGHT_NAMES as WEIGHT_NAMES
from sdxl.hub import check_on_hub, download
from sdxl.model_names import HUB_ID, MINI_NAME, MINI_NAMES, is_file, is_here, name_of, split_vae
from sdxl.params import InvalidParams, Sizes
from sdxl.places import MINI as MINI
from sdxl.places import MINI_REFINER
from sdxl.presets import Presets, load_presets
from sdxl.prompt import Tokenizer
from sdxl.scheduler_config import SchedulerConfig
from sdxl.single_file.recognition import (
    AS_REFINER,
    PICKLES,
    SAFETENSORS,
    check_has_vae,
    check_is_refiner,
    check_is_sdxl,
    read_header,
)
from sdxl.specs import Architecture

if TYPE_CHECKING:
    from torch import nn

COMMIT = re.compile(r"[0-9a-f]{40}")
NETWORK_FOLDERS = ("text_encoder", "text_encoder_2", "unet", "vae")
MIN_LATENT_SIDE, MAX_SIDE_FACTOR = 8, 4


class UnknownModel(InvalidParams, CheckpointError):
    """A model name that is neither here nor on the hub."""


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk. Files are read on first use."""

    name: str
    folder: Path
    origin: str = ""
    """`org/name@commit` of a model from the hub"""

    @cached_property
    def index(self) -> dict[str, Any]:
        return _read_json(self.folder / "model_index.json")

    @property
    def is_refiner(self) -> bool:
        """True if it only refines the latents of another model."""
        return bool(self.index.get("requires_aesthetics_score"))

    @property
    def parts(self) -> tuple[str, ...]:
        """The folders of its networks. A refiner's latents are decoded by the base model's VAE."""
        return ("text_encoder_2", "unet") if self.is_refiner else NETWORK_FOLDERS

    def config(self, part: str) -> dict[str, Any]:
        return _read_json(self.folder / part / "config.json")

    @cached_property
    def arch(self) -> Architecture:
        parts = ("unet", "vae", "text_encoder", "text_encoder_2")
        try:
            clip_l = None if self.is_refiner else self.config("text_encoder")
            unet, vae, clip_g = map(self.config, ("unet", "vae", "text_encoder_2"))
            return Architecture.from_configs(unet, vae, clip_l, clip_g)
        except (LookupError, ValueError, TypeError) as error:
            cause = f"lack {error}" if isinstance(error, KeyError) else f"do not fit: {error}"
            raise CheckpointError(
                f"{self.folder}: the config.json of {', '.join(parts)} {cause}"
            ) from error

    @cached_property
    def sizes(self) -> Sizes:
        arch = self.arch
        side = arch.default_side
        smallest = min(MIN_LATENT_SIDE * arch.vae_scale, side)
        return Sizes(side, smallest, side * MAX_SIDE_FACTOR, arch.vae_scale)

    @cached_property
    def scheduler(self) -> SchedulerConfig:
        path = self.folder / "scheduler" / "scheduler_config.json"
        return SchedulerConfig.from_dict(_read_json(path))

    @cached_property
    def presets(self) -> Presets:
        return load_presets(self.folder, lambda: self.digest)

    @cached_property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """The tokenizers of both text encoders; a refiner uses its only one for both."""
        first = "tokenizer_2" if self.is_refiner else "tokenizer"
        return self._tokenizer(first), self._tokenizer("tokenizer_2")

    def _tokenizer(self, name: str) -> Tokenizer:
        folder = _existing(self.folder / name)
        with foreign_errors(folder):
            return Tokenizer.from_folder(folder)

    @property
    def force_zeros(self) -> bool:
        return bool(self.index.get("force_zeros_for_empty_prompt", True))

    @cached_property
    def digest(self) -> str:
        """Digest of weights and configs, which engines of this model record."""
        total = hashlib.sha256()
        for name, digest in self.file_digests.items():
            total.update(f"{name}\0".encode() + bytes.fromhex(digest))
        return total.hexdigest()

    @cached_property
    def file_digests(self) -> dict[str, str]:
        """The sha256 of every config and weight file, by path in the folder."""
        return {
            f"{part}/{path.name}": sha256_of(path)
            for part in self.parts
            for path in (self.folder / part / "config.json", *self.weight_files(part))
        }

    def weight_files(self, part: str) -> list[Path]:
        """Return the safetensors files of one network after checking that they are complete."""
        return self._weights(part)[1]

    def _weights(self, part: str) -> tuple[str | None, list[Path]]:
        """Return the variant and its files; variant fp16 only if there is no other."""
        folder, stem = _existing(self.folder / part), WEIGHT_NAMES[part]
        for variant in (None, "fp16"):
            suffix = f".{variant}" if variant else ""
            single = folder / f"{stem}{suffix}.safetensors"
            sharded = folder / f"{stem}.safetensors.index{suffix}.json"
            files = [single] if single.exists() else _shards(sharded)
            if files:
                for file in files:
                    count_numbers(file)
                return variant, files
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
        if pickles:
            raise CheckpointError(
                f"{folder / pickles[0]}: pickle weights can run code and are refused; "
                f"expected {stem}.safetensors"
            )
        raise CheckpointError(f"{folder}: no weights found; expected {stem}.safetensors")

    def part(self, part: str) -> nn.Module:
        """Build diffusers' or transformers' module of one folder with this checkpoint's weights in
        float32. Refuse a UNet that is not SDXL's."""
        import torch

        if part == "unet":
            self._check_unet()
        variant, files = self._weights(part)
        check_network(self.folder / part, self.config(part), files)
        with quiet_loading(), foreign_errors(self.folder / part):
            model, report = network_class(part).from_pretrained(
                str(self.folder / part),
                use_safetensors=True,
                local_files_only=True,
                variant=variant,
                torch_dtype=torch.float32,
                output_loading_info=True,
            )
        missing = sorted(report["missing_keys"])
        if missing:
            raise CheckpointError(
                f"{files[0]}: {len(missing)} tensors of the network are missing, "
                f"{missing[0]!r} the first"
            )
        return model.eval().requires_grad_(False)

    def _check_unet(self) -> None:
        from sdxl.networks.unet import REFINER, SUPPORTED

        config = self.config("unet")
        kind = "SDXL refiner" if self.is_refiner else "SDXL"
        has_fourth_level = self.is_refiner and len(config.get("block_out_channels", ())) != 3
        for key, needed in (REFINER if has_fourth_level else SUPPORTED).items():
            if config.get(key, needed) != needed:
                raise CheckpointError(
                    f"{self.folder / 'unet' / 'config.json'}: {key} is {config[key]!r}, "
                    f"an {kind} has {needed!r}"
                )


def find(model: str) -> Checkpoint:
    """Find a model: `mini`, a folder in diffusers layout, a safetensors file, or a hub id such as
    `org/name` or `org/name@revision` (branch, tag or commit). A suffix `,vae=FILE` replaces the
    VAE."""
    check_files(model)
    base, vae = split_vae(model)
    checkpoint = _find(base)
    if checkpoint.is_refiner:
        raise CheckpointError(f"model {model!r}: is the SDXL refiner; {AS_REFINER}")
    if not vae:
        return checkpoint
    from sdxl.single_file.folder import with_vae

    origin = checkpoint.origin and checkpoint.origin + VAE_MARK + vae
    folder = with_vae(checkpoint.folder, _vae_file(vae))
    return Checkpoint(name_of(model), folder, origin)


def find_refiner(model: str) -> Checkpoint:
    """Find a refiner: `mini`, a folder in diffusers layout, a safetensors file, or a hub id."""
    check_files(model, is_refiner=True)
    if model in MINI_NAMES:
        return Checkpoint(MINI_NAME, MINI_REFINER, MINI_NAME)
    checkpoint = _find(model)
    if not checkpoint.is_refiner:
        raise CheckpointError(
            f"refiner {model!r}: model_index.json lacks requires_aesthetics_score; expected an "
            "SDXL refiner"
        )
    return checkpoint


def check_files(model: str, *, is_refiner: bool = False) -> None:
    """Raise CheckpointError for missing files or files of another model. It takes milliseconds and
    does not use the network."""
    base, vae = split_vae(model)
    if vae:
        read_header(_vae_file(vae))
    if is_file(base):
        header = read_header(Path(os.path.expanduser(base)))
        if is_refiner:
            check_is_refiner(header)
            return
        check_is_sdxl(header)
        if not vae:
            check_has_vae(header)
    elif base not in MINI_NAMES and is_here(base):
        _check_folder(base)


def check_model(model: str, *, is_refiner: bool = False) -> None:
    """Do `check_files`, and check that a hub id exists on the hub."""
    check_files(model, is_refiner=is_refiner)
    base, _ = split_vae(model)
    if base in MINI_NAMES or is_here(base):
        return
    hub = HUB_ID.fullmatch(base)
    if hub is None:
        raise _unknown(base)
    check_on_hub(base, hub["repo"], hub["revision"])


def _check_folder(model: str) -> None:
    folder = Path(os.path.expanduser(model))
    if not (folder / "model_index.json").exists():
        raise CheckpointError(
            f"model {model!r}: no model_index.json there; expected a folder in diffusers layout"
        )
    for path in (*folder.glob("*"), *folder.glob("*/*")):
        if path.exists() and not (path.is_file() or path.is_dir()):
            # Opening a named pipe would wait for a writer.
            raise CheckpointError(f"{path}: not a regular file")


def _find(model: str) -> Checkpoint:
    if model in MINI_NAMES:
        return Checkpoint(MINI_NAME, MINI, MINI_NAME)
    if is_file(model):
        from sdxl.single_file.folder import folder_of

        path = Path(os.path.expanduser(model))
        return Checkpoint(name_of(model), folder_of(path, MINI))
    if is_here(model):
        return Checkpoint(name_of(model), Path(os.path.expanduser(model)))
    if match := HUB_ID.fullmatch(model):
        repo, revision = match["repo"], match["revision"]
        snapshot = download(repo, revision)
        commit = snapshot.name if COMMIT.fullmatch(snapshot.name) else revision
        origin = f"{repo}@{commit}" if commit else repo
        return Checkpoint(name_of(model), snapshot, origin)
    raise _unknown(model)


def _unknown(model: str) -> UnknownModel:
    known = f"'mini', a folder in diffusers layout, a {SAFETENSORS} file, or a hub id"
    return UnknownModel("model", model, f"must be {known}")


def _vae_file(name: str) -> Path:
    """Return the VAE's weight file; `name` may be the folder that contains it."""
    path = Path(os.path.expanduser(name))
    inside = path / f"{WEIGHT_NAMES['vae']}{SAFETENSORS}"
    return inside if path.is_dir() else path


def _existing(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(f"{path}: not there; expected a folder in diffusers layout")
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_existing(path).read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {type(value).__name__}, expected an object")
    return value


def _shards(index: Path) -> list[Path]:
    if not index.exists():
        return []
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: needs weight_map, an object from tensor to file")
    names = list(weight_map.values())
    if not all(
        isinstance(name, str) and Path(name).name == name and name.endswith(SAFETENSORS)
        for name in names
    ):
        raise CheckpointError(f"{index}: needs names of {SAFETENSORS} files in its folder")
    return [_existing(index.parent / name) for name in sorted(set(names))]


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Disable the libraries' progress bars and reports, which would break `--json`."""
    import diffusers.utils.logging as diffusers_logging
    import transformers.utils.logging as transformers_logging

    levels = [(m, m.get_verbosity()) for m in (diffusers_logging, transformers_logging)]
    for module, _ in levels:
        module.set_verbosity_error()
        module.disable_progress_bar()
    try:
        yield
    finally:
        for module, level in levels:
            module.set_verbosity(level)
            module.enable_progress_bar()
