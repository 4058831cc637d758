"""A row's image and mask: where they lie, and the order for the edit.

A path must lie below the input file's folder: the author of an input may not be its operator.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sdxl.params import InvalidParams
from sdxl.source import GivenImage
from serve.batch.rows import BatchRow
from serve.errors import invalid, of_params
from serve.orders import ImageOrder, ModelCard
from serve.render.editing import content

IMAGE, MASK = "image", "mask"
PICTURES = (IMAGE, MASK)
"""columns that name a picture"""
DATA_URL, BASE64 = "data:", ";base64,"
MAX_BYTES = 64 << 20
"""of a file; a service takes less"""


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
    path = (root / text).resolve()
    if not path.is_relative_to(root):
        raise InvalidParams(name, text[:80], "must be a path below the input's folder")
    return str(path)


def read(name: str, place: str) -> bytes:
    if place.startswith(DATA_URL):
        kind, is_base64, data = place.partition(BASE64)
        with suppress(binascii.Error, ValueError):
            if is_base64:
                return base64.b64decode(data, validate=True)
        raise InvalidParams(name, f"{kind[:40]}…", "must be base64: data:image/png;base64,…")
    if os.path.isfile(place) and os.path.getsize(place) > MAX_BYTES:
        raise InvalidParams(name, Path(place).name, f"must have at most {MAX_BYTES} bytes")
    return content(place, name)


def order_of(row: BatchRow, format: str, card: ModelCard) -> ImageOrder:
    """Read a row's image and make its order. Raises Problem if the image cannot be edited."""
    assert row.params is not None and row.image is not None
    if not card.can_edit:
        message = "image: neither a service nor engines without vae_encoder edit images in a job"
        raise invalid(IMAGE, message)
    try:
        mask = None if row.mask is None else read(MASK, row.mask)
        given = GivenImage.read(read(IMAGE, row.image), mask)
        params = given.sized(row.params, card.sizes).resolve(card.sizes, lambda: 0)
        return ImageOrder(params, format, source=given.source(params))
    except InvalidParams as error:
        raise of_params(error) from None
