"""A row's image and mask: where they lie, and the order that they make of a row.

A path is one below the folder of the input file, and of nothing else: whoever writes the input need
not be whoever runs it. It draws nothing.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdxl.params import InvalidParams
from sdxl.source import GivenImage
from serve.batch.rows import BatchRow
from serve.errors import invalid, of_params
from serve.orders import ImageOrder, ModelCard

IMAGE, MASK = "image", "mask"
PICTURES = (IMAGE, MASK)
"""columns that name a picture"""
DATA_URL, BASE64 = "data:", ";base64,"
MAX_BYTES = 64 << 20
"""of a file; the service takes less"""


def places(values: Mapping[str, Any], folder: str) -> dict[str, str]:
    """Where a record's pictures lie: absolute paths, or data URLs."""
    found = {name: place(name, values[name], folder) for name in PICTURES if name in values}
    if MASK in found and IMAGE not in found:
        raise InvalidParams(MASK, str(values[MASK])[:80], "needed an image with it")
    return found


def place(name: str, text: object, folder: str) -> str:
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidParams(name, str(text)[:80], "needed a path or a data URL")
    if text.startswith(DATA_URL):
        return text
    root = Path(folder).resolve()
    path = (root / text).resolve()
    if not path.is_relative_to(root):
        raise InvalidParams(name, text[:80], "needed a path below the input's folder")
    return str(path)


def read(name: str, place: str) -> bytes:
    if place.startswith(DATA_URL):
        kind, found, data = place.partition(BASE64)
        try:
            if found:
                return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            pass
        raise InvalidParams(name, f"{kind[:40]}…", "needed base64: data:image/png;base64,…")
    path = Path(place)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InvalidParams(name, path.name, f"at most {MAX_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        needed = f"needed a file that every worker can read ({error.strerror})"
        raise InvalidParams(name, place, needed) from error


def order_of(row: BatchRow, format: str, card: ModelCard) -> ImageOrder:
    """Of a row with an image. Raises Problem for an image that cannot be made anew."""
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
