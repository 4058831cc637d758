"""How a model is named: on a command line, in a setting, and to clients.

It opens no model and fetches nothing.
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
    """What clients call it; also where its folder does not lie."""
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
    """Whether a single file is meant: it is one, or is named as one."""
    path = Path(os.path.expanduser(model))
    return path.is_file() or (path.suffix.lower() in (SAFETENSORS, *PICKLES) and not path.is_dir())


def folders_of(model: str, folder: Path, kind: str, named: str = "") -> list[Path]:
    """Where a model's LoRAs, ControlNets or IP-Adapters lie: the named folder first, then beside
    the model and in the home. `folder` is that of a model from the hub, `kind` the name of
    theirs."""
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
    """Whether it is found without asking the hub. It need not be a model."""
    base, vae = split_vae(model)
    files = [vae] if base in MINI_NAMES else [base, vae]
    return all(os.path.exists(os.path.expanduser(file)) for file in files if file)
