"""The pictures that a row names: an edit's, and those of ControlNets and image prompts.

A path must lie below the input file's folder: the operator may not trust the input's author.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdxl.params import PICTURED, GenerationParams, InvalidParams
from sdxl.pictured import Pictured
from sdxl.source import GivenImage, SourceImage
from serve.batch.rows import BatchRow, Maps
from serve.errors import invalid, of_params
from serve.orders import ImageOrder, ModelCard
from serve.render.input_pictures import read_file, read_pictures

IMAGE, MASK = "image", "mask"
PICTURES = (IMAGE, MASK)
"""Columns that name a picture."""
CONTROLS, NAME, MAP, STRENGTH = "controls", "control", "control_image", "control_strength"
CONTROL_COLUMNS: Mapping[str, type] = {NAME: str, MAP: str, STRENGTH: float}
"""Columns for a row with one ControlNet, and their types."""
DATA_URL, BASE64 = "data:", ";base64,"
MAX_BYTES = 64 << 20
"""The largest file; a service's limit is lower."""


def places(values: Mapping[str, Any], folder: str) -> dict[str, str]:
    """Return the absolute paths or data URLs of a record's pictures."""
    pictures = {name: place(name, values[name], folder) for name in PICTURES if name in values}
    if MASK in pictures and IMAGE not in pictures:
        raise InvalidParams(MASK, str(values[MASK])[:80], "needs an image")
    return pictures


def place(name: str, text: object, folder: str) -> str:
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidParams(name, str(text)[:80], "must be a path or a data URL")
    if text.startswith(DATA_URL):
        return text
    root = Path(folder).resolve()
    # Invalid Unicode and loops of links have no path.
    with suppress(RuntimeError, UnicodeEncodeError):
        path = (root / text).resolve()
        if path.is_relative_to(root):
            return str(path)
    raise InvalidParams(name, text[:80], "must be a path below the input's folder")


def read(name: str, place: str) -> bytes:
    if place.startswith(DATA_URL):
        kind, is_base64, data = place.partition(BASE64)
        with suppress(binascii.Error, ValueError):
            if is_base64:
                return base64.b64decode(data, validate=True)
        raise InvalidParams(name, f"{kind[:40]}…", "must be base64: data:image/png;base64,…")
    if os.path.isfile(place) and os.path.getsize(place) > MAX_BYTES:
        raise InvalidParams(name, Path(place).name, f"must have at most {MAX_BYTES} bytes")
    return read_file(place, name)


def controls_in(values: Mapping[str, Any], flags: object) -> object:
    """Return a row's ControlNets, from any of its columns. `flags`: the command's ControlNets, for
    a row that names only a map."""
    named = next((name for name in CONTROL_COLUMNS if name in values), None)
    if named is None:
        return values.get(CONTROLS)
    if CONTROLS in values:
        raise InvalidParams(named, str(values[named])[:80], f"cannot be set beside {CONTROLS}")
    given: list[Any] = [values[NAME]] if NAME in values else list(read_list(CONTROLS, flags))
    if len(given) != 1:
        needed = f"needs {NAME}, the name of its ControlNet"
        raise InvalidParams(named, str(values[named])[:80], needed)
    (one,) = read_list(CONTROLS, given)
    fields = {"image": values.get(MAP, one.image), "strength": values.get(STRENGTH, one.strength)}
    return [replace(one, **fields)]


def locate_pictures(
    field: str, entries: object, folder: str, files: Mapping[str, str]
) -> tuple[tuple[Pictured, ...], Maps]:
    """Return the entries of a list, and their pictures by `image`: a path or a digest. `files`: the
    files of flags by digest."""
    located, maps = [], dict[str, bytes | Path]()
    for each in read_list(field, entries):
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


def read_list(field: str, entries: object) -> tuple[Any, ...]:
    """Read a list. In a Parquet file, fields that a row leaves out are null."""
    if isinstance(entries, list):
        entries = [
            {name: value for name, value in entry.items() if value is not None}
            if isinstance(entry, Mapping)
            else entry
            for entry in entries
        ]
    return PICTURED[field].read_list(entries or ())


def order_of(row: BatchRow, format: str, card: ModelCard) -> ImageOrder:
    """Read a row's pictures and make its order. Raises Problem if they cannot be used."""
    assert row.params is not None
    if row.image is not None and not card.can_edit:
        message = "image: neither a service nor engines without vae_encoder edit images in a job"
        raise invalid(IMAGE, message)
    try:
        params, maps = read_maps(row, row.params)
        params, source = (params, None) if row.image is None else read_edit(row, params, card)
    except InvalidParams as error:
        raise of_params(error) from None
    return ImageOrder(params, row.format or format, row.compression, source=source, maps=maps)


def read_edit(
    row: BatchRow, params: GenerationParams, card: ModelCard
) -> tuple[GenerationParams, SourceImage]:
    assert row.image is not None
    mask = None if row.mask is None else read(MASK, row.mask)
    given = GivenImage.read(read(IMAGE, row.image), mask)
    params = given.sized(params, card.sizes).resolve(card.sizes, lambda: 0)
    return params, given.source(params)


def read_maps(
    row: BatchRow, params: GenerationParams
) -> tuple[GenerationParams, Mapping[str, bytes]]:
    """Read the pictures of ControlNets and image prompts. A file that a flag names must not have
    changed since the job began."""

    def file_of(image: str, name: str) -> bytes:
        source = row.maps[image]
        return source if isinstance(source, bytes) else read(name, str(source))

    files, lists = dict[str, bytes](), dict[str, Any]()
    for name in PICTURED:
        given = getattr(params, name) or ()
        entries, pictures = read_pictures(name, given, file_of)
        for before, now in zip(given, entries, strict=True):
            place = row.maps.get(before.image)
            if isinstance(place, Path) and before.image not in (str(place), now.image):
                raise InvalidParams(name, str(place), "must be as the job began with it")
        lists[name], files = entries or None, files | pictures
    return replace(params, **lists), files
