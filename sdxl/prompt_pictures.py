"""The pictures of a request's image prompts. It knows no torch and no networks."""

from __future__ import annotations

from sdxl.control_maps import Pictures, read_map
from sdxl.image_prompts import ImagePrompt
from sdxl.params import GenerationParams, InvalidParams

FIELD = "image_prompts"
PICTURE = "its picture"
"""what errors call it"""


def picture_file(prompt: ImagePrompt, pictures: Pictures) -> bytes:
    """Return the file of its picture. Raise InvalidParams if there is none."""
    data = pictures.get(prompt.image)
    if data is None:
        raise wrong_picture(prompt, "needs its picture")
    return data


def check_prompt_pictures(params: GenerationParams, pictures: Pictures) -> None:
    """Raise InvalidParams for a picture that is missing or wrong."""
    for each in params.image_prompts or ():
        data = picture_file(each, pictures)
        try:
            read_map(data, PICTURE)
        except InvalidParams as error:
            raise wrong_picture(each, error) from None


def wrong_picture(prompt: ImagePrompt, needed: object) -> InvalidParams:
    return InvalidParams(FIELD, None, f"with {prompt.name!r}: {needed}")
