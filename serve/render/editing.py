"""The files of a command's images, read before the model is loaded."""

from __future__ import annotations

from pathlib import Path

from sdxl.params import InvalidParams
from sdxl.source import GivenImage


def read_image(image: str | None, mask: str | None) -> GivenImage | None:
    if image is None:
        if mask is not None:
            raise InvalidParams("mask", mask, "needs --image")
        return None
    return GivenImage.read(content(image, "image"), content(mask, "mask") if mask else None)


def content(name: str, field: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        needed = f"must be a readable file ({error.strerror})"
        raise InvalidParams(field, name, needed) from error
