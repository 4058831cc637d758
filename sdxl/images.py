"""Pixels and files of pictures. A file contains the parameters to generate the picture again."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin
from torch import Tensor

from sdxl.infotext import parameters_text as parameters_text
from sdxl.params import PARAMETERS, GenerationParams, InvalidParams
from sdxl.picture_files import EXIF_IFD, USER_COMMENT, BrokenPicture, opened
from sdxl.source import SHARP, SourceImage

Pixels = NDArray[np.uint8]

# Timothy Alexis Vass, "Explaining the SDXL latent space" (2024): RGB from 0 to 255 from the loop's
# latents. Rows are R, G, B; columns are the four channels.
SDXL_RGB = ((60, -60, 25, -70), (60, -5, 15, -50), (60, 10, -5, -35))
SDXL_RGB_BIAS = (150, 140, 130)

IMAGE_DESCRIPTION = 0x010E
XMP_CHUNK = "XML:com.adobe.xmp"
MAX_JPEG_EXIF = 65_000
"""JPEG stores metadata in one segment with a 16-bit length."""


class BrokenImage(RuntimeError):
    """The decoder's output has values that are not finite."""


class NoParameters(ValueError):
    """A file has no parameters."""


class BrokenPreviewMap(ValueError):
    """A preview.json has no valid map."""


def to_pixels(image: Tensor) -> Pixels:
    """Convert [3, H, W] or [n, 3, H, W] in [-1, 1] to 8 bits, channels last, as diffusers does."""
    pixels, is_finite = rounded(image.cpu())
    if not is_finite:
        broken = int((~image.isfinite()).sum())
        raise BrokenImage(
            f"{broken} of the image's {image.numel()} values are not finite: the decoder "
            f"overflowed in {image.dtype}; run it in float32 or bfloat16"
        )
    return pixels.numpy()


def pasted(pixels: Pixels, source: SourceImage) -> Pixels:
    """Paste an edit's result into its source."""
    return np.array(source.pasted(Image.fromarray(pixels)))


def enlarged(pixels: Pixels, leg: GenerationParams) -> SourceImage:
    """Enlarge an upscaled picture's first leg to the source of the next leg."""
    assert leg.width and leg.height
    return SourceImage(Image.fromarray(pixels).resize((leg.width, leg.height), SHARP), None)


def rounded(image: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8-bit pixels, and whether all values are finite, on the device without waiting."""
    exact = image.float()
    scaled = (exact * 0.5 + 0.5).clamp(0, 1).movedim(-3, -1)
    return (scaled * 255).round().to(torch.uint8).contiguous(), exact.isfinite().all()


def load_preview_map(folder: Path, channels: int) -> Tensor:
    """Return the linear map from latents to RGB, [channels + 1, 3], bias last: the checkpoint's
    `preview.json`, else SDXL's published map."""
    path = folder / "preview.json"
    if path.exists():
        rows = _stored_map(path)
    elif channels == len(SDXL_RGB[0]):
        matrix = torch.tensor(SDXL_RGB, dtype=torch.float32).T
        bias = torch.tensor(SDXL_RGB_BIAS, dtype=torch.float32)
        rows = torch.cat([matrix, bias[None] - 127.5]) / 127.5
    else:
        raise BrokenPreviewMap(
            f"{path} is missing, and SDXL's map is for 4 channels, not {channels}"
        )
    if rows.shape != (channels + 1, 3) or not torch.isfinite(rows).all():
        raise BrokenPreviewMap(
            f"{path}: {channels} channels need {channels} + 1 rows of 3 finite numbers"
        )
    return rows


def _stored_map(path: Path) -> Tensor:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        numbers = [*stored["latent_rgb_factors"], stored["latent_rgb_bias"]]
        return torch.tensor(numbers, dtype=torch.float32)
    except (LookupError, OSError, OverflowError, RecursionError, TypeError, ValueError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise BrokenPreviewMap(
            f"{path}: needs latent_rgb_factors and latent_rgb_bias ({cause})"
        ) from error


def preview(latents: Tensor, preview_map: Tensor) -> Pixels:
    """Return a small image of latents [C, h, w], with one pixel for each latent pixel."""
    flat = latents.detach().cpu().float().movedim(0, -1)
    return to_pixels((flat @ preview_map[:-1] + preview_map[-1]).movedim(-1, 0))


def forming(
    latents: Tensor, preview_map: Tensor, size: tuple[int, int], source: SourceImage | None = None
) -> Pixels:
    """Return a preview at the picture's size, pasted into the source of an edit."""
    small = Image.fromarray(preview(latents, preview_map))
    pixels = np.asarray(small.resize(size, Image.Resampling.BICUBIC))
    return pixels if source is None else pasted(pixels, source)


def encode(
    pixels: Pixels | Image.Image,
    format: str,
    params: Mapping[str, Any],
    quality: int | None = None,
    xmp: str | None = None,
) -> bytes:
    """Encode a png, jpeg or webp with the picture's parameters and an `xmp` packet. Equal pictures
    have equal bytes: no time, place or machine name."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    if format == "png":
        image.save(file, "PNG", pnginfo=_png_chunks(params, xmp))
    else:
        quality = 95 if quality is None else quality
        exif = _exif(params, format)
        more = {"xmp": xmp.encode()} if xmp else {}
        image.save(file, format.upper(), exif=exif, quality=quality, **more)
    return file.getvalue()


def check_metadata(params: Mapping[str, Any], format: str) -> None:
    """Raise InvalidParams for parameters that do not fit into the format's metadata."""
    if format == "jpeg":
        _exif(params, format)


def stored_fields(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters for a picture's metadata; most of them only if they are set."""
    optional = {p.name for p in PARAMETERS.values() if not p.is_always_stored}
    return {name: v for name, v in params.items() if v is not None or name not in optional}


def read_parameters(source: Path | bytes) -> dict[str, Any]:
    """Read the parameters from a picture's file, or raise NoParameters."""
    data = source if isinstance(source, bytes) else source.read_bytes()
    try:
        with opened(data) as image:
            stored = image.info.get("sdxl") or image.getexif().get(IMAGE_DESCRIPTION)
    except BrokenPicture as error:
        raise NoParameters("not an image") from error
    try:
        params = json.loads(stored or "")
    except (ValueError, TypeError, RecursionError) as error:
        raise NoParameters("the image carries no parameters") from error
    if not isinstance(params, dict):
        raise NoParameters("the image carries no parameters")
    return params


def _png_chunks(params: Mapping[str, Any], xmp: str | None) -> PngImagePlugin.PngInfo:
    chunks = PngImagePlugin.PngInfo()
    for name, text in (
        ("parameters", parameters_text(params)),
        ("sdxl", json.dumps(stored_fields(params), ensure_ascii=False)),
    ):
        # A tEXt chunk holds only Latin-1.
        try:
            text.encode("latin-1")
            chunks.add_text(name, text)
        except UnicodeEncodeError:
            chunks.add_itxt(name, text)
    if xmp:
        chunks.add_itxt(XMP_CHUNK, xmp)
    return chunks


def _exif(params: Mapping[str, Any], format: str) -> bytes:
    text = parameters_text(params)
    coded = b"ASCII\0\0\0" + text.encode() if text.isascii() else None
    exif = Image.Exif()
    exif[IMAGE_DESCRIPTION] = json.dumps(stored_fields(params))
    exif.get_ifd(EXIF_IFD)[USER_COMMENT] = coded or b"UNICODE\0" + text.encode("utf-16-be")
    data = exif.tobytes()
    if format == "jpeg" and len(data) > MAX_JPEG_EXIF:
        texts = {name: params.get(name) or "" for name in ("prompt", "negative_prompt")}
        longest = max(texts, key=lambda name: len(json.dumps(texts[name])))
        size = f"{len(texts[longest])} characters"
        raise InvalidParams(longest, size, "must fit into a JPEG's metadata; use png or webp")
    return data
