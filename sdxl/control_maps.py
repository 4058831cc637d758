"""The pictures of a request's ControlNets and image prompts: checked, and maps fitted to the
request's size.

It knows no torch and no networks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

from PIL import Image, ImageOps

from sdxl.controls import CANNY, CROP, FILL, Control
from sdxl.image_prompts import ImagePrompt
from sdxl.params import GenerationParams, InvalidParams
from sdxl.source import SHARP, SourceImage, decode

TOLERANCE = 0.02
"""the largest relative difference of proportions if a request does not choose `resize`"""
MOST_PIXELS = 2**21
"""the most pixels of a map that is only previewed"""
MAP, PICTURE = "its map", "its picture"
"""names of the pictures in errors"""
Pictures = Mapping[str, bytes]
"""the files of maps and of image prompts' pictures, by the attachment's `image`"""


def add_map(file: bytes, maps: dict[str, bytes]) -> str:
    """Add a picture's file to `maps`; return its key, the SHA-256."""
    digest = hashlib.sha256(file).hexdigest()
    maps[digest] = file
    return digest


def shown_map(
    control: Control, params: GenerationParams, pictures: Pictures, source: SourceImage | None
) -> Image.Image:
    """Return the preprocessed map at the picture's size. Raise InvalidParams without a good map."""
    size, given_map = _size_of(params), _given_map(control, pictures, source)
    if given_map is None:
        assert source is not None
        picture = source.image if source.size == size else source.image.resize(size, SHARP)
    else:
        whole = source.whole if source else None
        picture = fitted(given_map, whole.size if whole else size, control)
        picture = picture.resize(size, SHARP, whole.box) if whole else picture
    return preprocessed(picture, control)


def preprocessed(picture: Image.Image, control: Control) -> Image.Image:
    if control.preprocess != CANNY:
        return picture
    # Imported here: a front end checks maps without numpy.
    import numpy as np

    from sdxl.canny import canny

    edges = canny(np.array(picture), control.low, control.high)
    return Image.fromarray(edges).convert("RGB")


def check_pictures(
    params: GenerationParams, pictures: Pictures, source: SourceImage | None = None
) -> None:
    """Raise InvalidParams for a map or an image prompt's picture that is missing or wrong. Maps are
    not prepared."""
    whole = source.whole if source else None
    size = whole.size if whole else _size_of(params)
    for control in params.controls or ():
        given_map = _given_map(control, pictures, source)
        if given_map is not None:
            check_proportions(given_map, size, control)
    for prompt in params.image_prompts or ():
        data = picture_file(prompt, pictures)
        try:
            read_map(data, PICTURE)
        except InvalidParams as error:
            raise prompt.refused(error) from None


def picture_file(prompt: ImagePrompt, pictures: Pictures) -> bytes:
    """Return the file of an image prompt's picture. Raise InvalidParams if it is missing."""
    data = pictures.get(prompt.image)
    if data is None:
        raise prompt.refused("needs its picture")
    return data


def fitted(picture: Image.Image, size: tuple[int, int], control: Control) -> Image.Image:
    check_proportions(picture, size, control)
    if picture.size == size:
        return picture
    if control.resize == CROP:
        return ImageOps.fit(picture, size, SHARP)
    if control.resize == FILL:
        return ImageOps.pad(picture, size, SHARP)
    return picture.resize(size, SHARP)


def check_proportions(picture: Image.Image, size: tuple[int, int], control: Control) -> None:
    stretched = (picture.width / picture.height) / (size[0] / size[1])
    if control.resize is None and abs(stretched - 1) > TOLERANCE:
        needed = (
            f"its map is {picture.width}x{picture.height}, the picture {size[0]}x{size[1]}; give a "
            "map of the same proportions, or resize: crop, fill or stretch"
        )
        raise control.refused(needed)


def _size_of(params: GenerationParams) -> tuple[int, int]:
    assert params.width and params.height
    return params.width, params.height


def previewed(data: bytes, control: Control) -> Image.Image:
    """Return a preprocessed picture of at most MOST_PIXELS."""
    picture = read_map(data, "image")
    scale = math.sqrt(MOST_PIXELS / (picture.width * picture.height))
    if scale < 1:
        width, height = (max(int(side * scale), 1) for side in picture.size)
        picture = picture.resize((width, height), SHARP)
    return preprocessed(picture, control)


def _given_map(
    control: Control, pictures: Pictures, source: SourceImage | None
) -> Image.Image | None:
    """Return the map that the request gives; None if the edited image is the map."""
    data = pictures.get(control.image)
    if data is not None:
        try:
            return read_map(data, MAP)
        except InvalidParams as error:
            raise control.refused(error) from None
    if source is None or control.image:
        raise control.refused("needs the picture of its map")
    return None


def read_map(data: bytes, field: str) -> Image.Image:
    """Decode a file and make transparent parts black. Raise InvalidParams."""
    picture = decode(data, field)
    if picture.has_transparency_data:
        black = Image.new("RGBA", picture.size, "black")
        picture = Image.alpha_composite(black, picture.convert("RGBA"))
    return picture.convert("RGB")
