"""The pictures of image prompts, and a check of all pictures of a request. It knows no torch and no
networks."""

from __future__ import annotations

from sdxl.control_maps import Pictures, check_maps, read_map
from sdxl.image_prompts import ImagePrompt
from sdxl.params import GenerationParams, InvalidParams
from sdxl.source import SourceImage

PICTURE = "its picture"
"""the picture's name in errors"""


def picture_file(prompt: ImagePrompt, pictures: Pictures) -> bytes:
    """Return the file of an image prompt's picture. Raise InvalidParams if it is missing."""
    data = pictures.get(prompt.image)
    if data is None:
        raise prompt.refused("needs its picture")
    return data


def check_pictures(
    params: GenerationParams, pictures: Pictures, source: SourceImage | None = None
) -> None:
    """Raise InvalidParams for a map or an image prompt's picture that is missing or wrong."""
    check_maps(params, pictures, source)
    for each in params.image_prompts or ():
        data = picture_file(each, pictures)
        try:
            read_map(data, PICTURE)
        except InvalidParams as error:
            raise each.refused(error) from None
