"""Parses a model's name on a command line or in a setting, and derives the name that clients see.

It opens no model and downloads nothing.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sdxl.arguments import VAE_MARK
from sdxl.params import InvalidParams
from sdxl.places import MINI, home
from sdxl.single_file.recognition import PICKLES, SAFETENSORS

MINI_NAME = "sdxl-mini"
MINI_NAMES = ("mini", MINI_NAME)
HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>\w[\w./-]*))?", re.ASCII)


def name_of(model: str) -> str:
    """Return the name that clients see. The model need not exist."""
    base, vae = split_vae(model)
    if vae:
        return f"{name_of(base)}+{Path(vae).stem}"
    if base in MINI_NAMES:
        return MINI_NAME
    path = Path(os.path.expanduser(base)).resolve()
    if is_file(base):
        return Path(base).stem
    hub = None if is_here(base) else HUB_ID.fullmatch(base)
    return hub["repo"].split("/")[1] if hub else path.name


def split_vae(model: str) -> tuple[str, str]:
    base, _, vae = model.partition(VAE_MARK)
    return base, vae


def is_file(model: str) -> bool:
    """True if the name is that of a single file, which need not exist."""
    path = Path(os.path.expanduser(model))
    return path.is_file() or (path.suffix.lower() in (SAFETENSORS, *PICKLES) and not path.is_dir())


def folders_of(model: str, folder: Path, kind: str, named: str = "") -> list[Path]:
    """Return the folders of a model's LoRAs, ControlNets or IP-Adapters: `named`, then `kind`
    beside the model and in the home. `folder` is the model's folder if it is from the hub."""
    base, _ = split_vae(model)
    if base in MINI_NAMES:
        folder = MINI
    elif is_here(base):
        folder = Path(os.path.abspath(os.path.expanduser(base)))
    check_folder(kind, named)
    chosen = [Path(named).expanduser()] if named else []
    return [*chosen, folder.parent / kind, home() / kind]


def check_folder(kind: str, named: str) -> None:
    if named and not Path(named).expanduser().is_dir():
        raise InvalidParams(kind, named, "must be a folder")


def is_here(model: str) -> bool:
    """True if the paths in the name exist, so the hub is not asked. They need not be a model."""
    base, vae = split_vae(model)
    files = [vae] if base in MINI_NAMES else [base, vae]
    return all(os.path.exists(os.path.expanduser(file)) for file in files if file)
