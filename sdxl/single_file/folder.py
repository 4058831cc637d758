"""Converts a single file to a folder in diffusers layout, once, below `$SDXL_HOME/single_files`;
also replaces a folder's VAE by the VAE of a file.

A folder is named by the digest of its sources, appears whole or not at all, and is made by one
process at a time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdxl.checkpoint_checks import foreign_errors
from sdxl.digests import remembered_digest, sha256_of, stamps
from sdxl.files import OutputError, grant_usual, locked, prepare_folder
from sdxl.hub import WEIGHT_NAMES
from sdxl.places import MINI, home
from sdxl.single_file import configs
from sdxl.single_file.recognition import (
    REFINER_CLIP_G,
    STEM,
    UNET,
    Header,
    check_is_refiner,
    check_is_sdxl,
    input_channels,
    read_header,
)

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

FORMAT = 1
"""Every file is converted again after a change of this number."""
SHARD = "1GB"
"""the size of a file of weights"""
INDEX, SCHEDULER = "model_index.json", "scheduler/scheduler_config.json"
MINI_FILES = ("preview.json", "presets.json")
TOKENIZERS = {"tokenizer": configs.END, "tokenizer_2": "!"}
"""the padding token of each"""


def folder_of(file: Path, mini: Path) -> Path:
    """Return the folder with this file's weights, without a VAE if the file has none or is a
    refiner. `mini` is the embedded model, which may also be a single file."""
    header = read_header(file)
    (check_is_refiner if _is_refiner(header) else check_is_sdxl)(header)
    name = f"{_safe(file.stem)}-{_sha256(file)[:16]}-{FORMAT}"
    with _place(name) as place:
        if not place.exists():
            log.warning("%s: converted once, into %s", file, place)
            with _making(place) as making:
                _convert(header, _source(header, mini), making)
    return place


def with_vae(base: Path, vae: Path) -> Path:
    """Return a folder with links to the model in `base` and the weights of this VAE file."""
    name = f"{_safe(base.name)}-{_safe(vae.stem)}-{_identity(base, vae)[:16]}-{FORMAT}"
    with _place(name) as place:
        if not place.exists():
            with _making(place) as making:
                _replace_vae(base, vae, making)
    return place


def _sha256(file: Path) -> str:
    return remembered_digest([file], lambda: sha256_of(file))


def _identity(base: Path, vae: Path) -> str:
    """Identify a base by the paths and stamps of its files, which the new folder only links to."""
    paths = [path for path in sorted(base.glob("*/*")) if path.is_file()]
    facts = [str(path.resolve()) for path in paths], stamps(paths), _sha256(vae)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _is_refiner(header: Header) -> bool:
    return header.has(REFINER_CLIP_G)


def _source(header: Header, mini: Path) -> Path | None:
    """Return the embedded model if its width matches; None for SDXL 1.0."""
    width = json.loads((mini / "unet" / "config.json").read_text())["block_out_channels"][0]
    stem = header.shapes.get(STEM, ())
    return mini if stem and stem[0] == width else None


def _convert(header: Header, mini: Path | None, making: Path) -> None:
    from safetensors.torch import load_file

    from sdxl.single_file.conversion import parts_of

    by_part = _configs(header, mini)
    with foreign_errors(header.path):
        tensors = load_file(header.path)
    parts = parts_of(header.path, tensors, by_part)
    for part, content in by_part.items():
        # A missing VAE still gets a configuration, which the file that replaces the VAE needs.
        _write_part(making / part, part, parts.get(part, {}))
        config = making / part / "config.json"
        if mini is not None and content == _stored(mini, part):
            shutil.copyfile(mini / part / "config.json", config)
        else:
            config.write_text(json.dumps(content, indent=1), encoding="utf-8")
    _write_rest(header, mini, making)


def _configs(header: Header, mini: Path | None) -> Mapping[str, Mapping[str, Any]]:
    whole = configs.REFINER_1_0 if _is_refiner(header) else configs.SDXL_1_0
    if mini is not None:
        whole = {part: _stored(mini, part) for part in whole}
    return {**whole, "unet": {**whole["unet"], "in_channels": input_channels(header)}}


def _stored(folder: Path, part: str) -> Mapping[str, Any]:
    return json.loads((folder / part / "config.json").read_text())


def _write_part(folder: Path, part: str, tensors: dict[str, Tensor]) -> None:
    from huggingface_hub import save_torch_state_dict

    folder.mkdir()
    if not tensors:
        return
    pattern = WEIGHT_NAMES[part] + "{suffix}.safetensors"
    save_torch_state_dict(tensors, folder, filename_pattern=pattern, max_shard_size=SHARD)
    for path in folder.iterdir():
        grant_usual(path)


def _write_rest(header: Header, mini: Path | None, making: Path) -> None:
    """Write tokenizers, scheduler and index, which a single file lacks."""
    source = mini or MINI
    (making / "scheduler").mkdir()
    index = json.loads((source / INDEX).read_text(encoding="utf-8"))
    index |= configs.REFINER_INDEX if _is_refiner(header) else {}
    (making / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    for name in MINI_FILES:
        if mini and (mini / name).exists():
            shutil.copyfile(mini / name, making / name)
    for name, pad in TOKENIZERS.items():
        if mini is None:
            configs.write_tokenizer(making / name, pad)
        elif (mini / name).exists():
            shutil.copytree(mini / name, making / name)
    base = json.loads((source / SCHEDULER).read_text(encoding="utf-8"))
    marks = {name for name in header.shapes if not name.startswith(UNET)}
    scheduler = configs.scheduler_config(base, marks, header.metadata)
    (making / SCHEDULER).write_text(json.dumps(scheduler, indent=1), encoding="utf-8")


def _replace_vae(base: Path, vae: Path, making: Path) -> None:
    from safetensors.torch import load_file

    from sdxl.single_file.conversion import vae_of

    read_header(vae)
    config = base / "vae" / "config.json"
    with foreign_errors(config):
        content = json.loads(config.read_text(encoding="utf-8"))
    with foreign_errors(vae):
        tensors = load_file(vae)
    _write_part(making / "vae", "vae", vae_of(vae, tensors, {"vae": content}))
    shutil.copyfile(config, making / "vae" / "config.json")
    for path in base.iterdir():
        if path.name != "vae" and not path.name.startswith("."):
            (making / path.name).symlink_to(path.resolve())


@contextmanager
def _place(name: str) -> Iterator[Path]:
    """Lock and yield the folder's path: several replicas may start at once."""
    place = home() / "single_files" / name
    prepare_folder(place.parent)
    with locked(place.with_name(f".{name}.lock")):
        yield place


@contextmanager
def _making(place: Path) -> Iterator[Path]:
    making = place.with_name(f".{place.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    try:
        making.mkdir()
        yield making
        os.rename(making, place)
    except OSError as error:
        raise error if isinstance(error, OutputError) else OutputError(place, error) from error
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _safe(name: str) -> str:
    return re.sub(r"[^\w.+-]", "_", name)[:60]
