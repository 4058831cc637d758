"""A row's ControlNets and image prompts: their columns, and where the files of their pictures
lie."""

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
"""of a row with one ControlNet, with their types"""


def controls_in(values: Mapping[str, Any], flags: object) -> object:
    """Return a row's list of ControlNets, from any of its columns. `flags` are those of the
    command, for a row that names a map alone."""
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


def placed(
    field: str, entries: object, folder: str, files: Mapping[str, str]
) -> tuple[tuple[Pictured, ...], Maps]:
    """Return the entries of a list, and their pictures by `image`, which is a path or a digest.
    `files` are those of flags, by digest."""
    made, maps = [], dict[str, bytes | Path]()
    for each in _read(field, entries):
        image: object = each.image
        if isinstance(image, str) and image in files:
            maps[image] = Path(files[image])
        elif image != "":
            found = place(field, image, folder)
            data = read(field, found) if found.startswith(DATA_URL) else Path(found)
            found = found if isinstance(data, Path) else hashlib.sha256(data).hexdigest()
            maps[found], each = data, replace(each, image=found)
        made.append(each)
    return tuple(made), maps


def _read(field: str, entries: object) -> tuple[Any, ...]:
    """Read a list. Columns of a Parquet file have null in each field that a row leaves out."""
    if isinstance(entries, list):
        entries = [_without_null(each) for each in entries]
    return PICTURED[field].read_list(entries or ())


def _without_null(entry: object) -> object:
    if not isinstance(entry, Mapping):
        return entry
    return {name: value for name, value in entry.items() if value is not None}
