"""A row's ControlNets and image prompts: their columns, and the files of their pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdxl.params import PICTURED, InvalidParams
from sdxl.pictured import Pictured
from serve.batch.editing import DATA_URL, place, read
from serve.batch.rows import Maps

CONTROLS, NAME, IMAGE, STRENGTH = "controls", "control", "control_image", "control_strength"
COLUMNS: Mapping[str, type] = {NAME: str, IMAGE: str, STRENGTH: float}
"""Columns for a row with one ControlNet, and their types."""


def controls_in(values: Mapping[str, Any], flags: object) -> object:
    """Return a row's ControlNets, from any of its columns. `flags`: the command's ControlNets, for
    a row that names only a map."""
    named = next((name for name in COLUMNS if name in values), None)
    if named is None:
        return values.get(CONTROLS)
    if CONTROLS in values:
        raise InvalidParams(named, str(values[named])[:80], f"cannot be set beside {CONTROLS}")
    given: list[Any] = [values[NAME]] if NAME in values else list(_read(CONTROLS, flags))
    if len(given) != 1:
        needed = f"needs {NAME}, the name of its ControlNet"
        raise InvalidParams(named, str(values[named])[:80], needed)
    (one,) = _read(CONTROLS, given)
    fields = {"image": values.get(IMAGE, one.image), "strength": values.get(STRENGTH, one.strength)}
    return [replace(one, **fields)]


def locate_pictures(
    field: str, entries: object, folder: str, files: Mapping[str, str]
) -> tuple[tuple[Pictured, ...], Maps]:
    """Return the entries of a list, and their pictures by `image`: a path or a digest. `files`: the
    files of flags by digest."""
    located, maps = [], dict[str, bytes | Path]()
    for each in _read(field, entries):
        image: object = each.image
        if isinstance(image, str) and image in files:
            maps[image] = Path(files[image])
        elif image != "":
            key = place(field, image, folder)
            if key.startswith(DATA_URL):
                data = read(field, key)
                key = hashlib.sha256(data).hexdigest()
                maps[key] = data
            else:
                maps[key] = Path(key)
            each = replace(each, image=key)
        located.append(each)
    return tuple(located), maps


def _read(field: str, entries: object) -> tuple[Any, ...]:
    """Read a list. In a Parquet file, fields that a row leaves out are null."""
    if isinstance(entries, list):
        entries = [
            {name: value for name, value in entry.items() if value is not None}
            if isinstance(entry, Mapping)
            else entry
            for entry in entries
        ]
    return PICTURED[field].read_list(entries or ())
