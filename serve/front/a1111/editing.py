"""Translates `img2img` of stable-diffusion-webui into an edit of this service.

An unsupported field is refused by name. It knows no HTTP server.
"""

from __future__ import annotations

from typing import Annotated, Any

from PIL import Image, ImageOps
from pydantic import Field, StrictBool

from sdxl.picture_files import file_of
from sdxl.source import GivenImage, decode, transparent
from serve.errors import invalid
from serve.front.a1111.wire import Number, TextToImage, Whole, image_bytes, request_of
from serve.front.openai_images import ImageRequest

FILL, ORIGINAL = 0, 1
"""Start of a masked part: the colours around it, or its pixels; 2 and 3 are not supported."""
MASK_BLUR = 4


class ImageToImage(TextToImage):
    init_images: Annotated[list[str], Field(min_length=1, max_length=1)]
    mask: str | None = None
    denoising_strength: Annotated[Number, Field(ge=0, le=1)] | None = 0.75
    mask_blur: Annotated[Whole, Field(ge=0)] | None = MASK_BLUR
    inpainting_fill: Whole | None = FILL
    inpaint_full_res: StrictBool | None = True
    inpaint_full_res_padding: Annotated[Whole, Field(ge=0)] | None = 0
    inpainting_mask_invert: Annotated[Whole, Field(ge=0, le=1)] | None = 0
    resize_mode: Whole | None = 0


def edit_of(asked: ImageToImage, chosen: dict[str, Any]) -> tuple[ImageRequest, GivenImage]:
    """Return the same request for /v1. Raises Problem, or InvalidParams for the image."""
    for name, allowed in (("resize_mode", (0,)), ("inpainting_fill", (FILL, ORIGINAL))):
        value = getattr(asked, name)
        if value not in (None, *allowed):
            needed = " or ".join(map(str, allowed))
            raise invalid(name, f"{name} must be {needed} here, got {value}")
    if asked.enable_hr:
        raise invalid("enable_hr", "enable_hr: is for txt2img; here the size may be larger")
    request = request_of(asked, chosen)
    strength = 0.75 if asked.denoising_strength is None else asked.denoising_strength
    facts: dict[str, Any] = {"strength": strength}
    if asked.mask is not None:
        facts["mask_blur"] = MASK_BLUR if asked.mask_blur is None else asked.mask_blur
        if asked.inpaint_full_res is not False:
            facts["mask_padding"] = asked.inpaint_full_res_padding or 0
    return request.model_copy(update=facts), image_of(asked)


def image_of(asked: ImageToImage) -> GivenImage:
    image = image_bytes(asked.init_images[0])
    if asked.mask is None:
        return GivenImage.read(as_png(on_white(decode(image, "init_images"))))
    white = redrawn_part(decode(image_bytes(asked.mask), "mask"))
    white = ImageOps.invert(white) if asked.inpainting_mask_invert else white
    if asked.inpainting_fill == ORIGINAL:
        return GivenImage.read(image, as_png(white))
    # A hole is filled with the colours around it.
    whole = on_white(decode(image, "init_images"))
    if whole.size != white.size:
        raise invalid("mask", "mask must have the image's size, {}x{}".format(*whole.size))
    whole.putalpha(ImageOps.invert(white))
    return GivenImage.read(as_png(whole))


def on_white(picture: Image.Image) -> Image.Image:
    """Return the image without transparency, as stable-diffusion-webui reads it."""
    whole, holes = picture.convert("RGB"), transparent(picture)
    if holes is not None:
        whole.paste("white", (0, 0, *whole.size), holes)
    return whole


def redrawn_part(mask: Image.Image) -> Image.Image:
    """Return a mask that is white where the image is redrawn. If a mask has transparency, its
    opacity counts."""
    if mask.has_transparency_data:
        alpha = mask.convert("RGBA").getchannel("A")
        if alpha.getextrema() != (255, 255):
            return alpha
    return mask.convert("L")


def as_png(image: Image.Image) -> bytes:
    return file_of(image, compress_level=1)
