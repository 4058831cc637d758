"""An edit's source image and mask: read, checked and resized; the result is pasted back.

It knows no networks, no HTTP and no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from PIL import Image, ImageFilter, ImageOps

from sdxl.params import PARAMETERS, GenerationParams, InvalidParams, Sizes
from sdxl.picture_files import FORMATS, BrokenPicture, TooLarge, opened

MAX_PIXELS = 2**25
"""of a source image; counted before it is decoded"""
SPREAD, REPEATS = (256, 64, 16, 4, 2), 4
"""radii in pixels by which colours spread into a hole, and how often each is applied"""
REACH = 3 * max(SPREAD)
"""pixels around a hole that colour it: Pillow blurs with three boxes, each as wide as a radius"""
DIGESTS = ("image_sha256", "mask_sha256")
"""metadata keys of a result for the digests of its source files"""
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
"""Pillow's modes of grey and RGB with 8 bits a channel"""
SHARP, EVEN = Image.Resampling.LANCZOS, Image.Resampling.BILINEAR
"""EVEN is for masks, at whose edges SHARP would ring."""
Box = tuple[int, int, int, int]
"""left, top, right, bottom"""


@dataclass(frozen=True, eq=False)
class WholeImage:
    """The whole image of an "only masked" edit. It stays compressed and is decoded for each result,
    because 33 megapixels take 170 MB."""

    image: bytes
    """the client's file"""
    mask: bytes | None
    """the client's file"""
    size: tuple[int, int]
    box: Box
    """the part that is redrawn"""
    blur: int
    """radius of the mask's blur in pixels"""
    key: str
    """digest of files and settings"""

    def decoded(self) -> DecodedWhole:
        files = GivenImage.read(self.image, self.mask)
        assert files.mask is not None
        mask = blurred(files.mask, self.blur).crop(self.box)
        return DecodedWhole(filled(files.picture), mask, self.box)


@dataclass(frozen=True)
class DecodedWhole:
    image: Image.Image
    mask: Image.Image
    """the mask within the box"""
    box: Box

    @contextmanager
    def pasted(self, result: Image.Image) -> Iterator[Image.Image]:
        """Paste `result` into the box where the mask is white, and yield the whole image. The image
        is not copied; it is restored for the next result."""
        left, top, right, bottom = self.box
        before = self.image.crop(self.box)
        result = result.resize((right - left, bottom - top), SHARP)
        self.image.paste(result, (left, top), self.mask)
        del result
        try:
            yield self.image
        finally:
            self.image.paste(before, (left, top))


@dataclass(frozen=True, eq=False)
class SourceImage:
    """An edit's source image, at the size of the edit."""

    image: Image.Image
    mask: Image.Image | None
    """white where the image changes; None: everywhere"""
    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the client's files, for the result's metadata"""
    whole: WholeImage | None = None
    """the image that the result is pasted into, if `image` is a part of it"""

    @property
    def size(self) -> tuple[int, int]:
        return self.image.size

    def pasted(self, result: Image.Image) -> Image.Image:
        """Paste an edit's result into the image, which stays unchanged where the mask is black."""
        if self.whole is not None:
            with self.whole.decoded().pasted(result) as image:
                return image.copy()
        if self.mask is None:
            return result
        return Image.composite(result.resize(self.size, SHARP), self.image, self.mask)


@dataclass(frozen=True)
class GivenImage:
    """An image and its mask as the client sent them, decoded and upright."""

    picture: Image.Image
    """RGBA if a part is transparent, into which colours are spread even without a mask"""
    mask: Image.Image | None
    digests: Mapping[str, str]
    """digests of the files by their metadata keys"""
    files: tuple[bytes, bytes | None]
    """image and mask, compressed"""

    @classmethod
    def read(cls, data: bytes, mask: bytes | None = None) -> GivenImage:
        """Read the files, or raise InvalidParams for an image that cannot be edited. Without a mask
        file, the transparent part is the mask."""
        picture = decode(data, "image")
        holes = transparent(picture)
        white = holes if mask is None else white_where_masked(decode(mask, "mask"))
        if white is not None and white.size != picture.size:
            needed = "must have the image's size, {}x{}".format(*picture.size)
            raise InvalidParams("mask", "{}x{}".format(*white.size), needed)
        if white is not None and white.getbbox() is None:
            raise InvalidParams("mask", "all of it kept", "must have a transparent or white part")
        files = {DIGESTS[0]: data} | ({} if mask is None else {DIGESTS[1]: mask})
        digests = {name: hashlib.sha256(file).hexdigest() for name, file in files.items()}
        mode = "RGB" if holes is None else "RGBA"
        picture = picture if picture.mode == mode else picture.convert(mode)
        return cls(picture, white, digests, (data, mask))

    def size(self, sizes: Sizes, *, is_part: bool) -> tuple[int, int]:
        """Return the edit's default size: the image's size, scaled down to the model's usual number
        of pixels; for a masked part the model's usual size."""
        if is_part:
            return sizes.default, sizes.default
        across, down = self.picture.size
        scale = min(1.0, sizes.default / math.sqrt(across * down))
        scale = max(scale, sizes.minimum / min(across, down))
        return nearest(across * scale, sizes), nearest(down * scale, sizes)

    def sized(self, params: GenerationParams, sizes: Sizes) -> GenerationParams:
        """Fill the request's size and strength, and check the upscaled size."""
        width, height = self.size(sizes, is_part=params.mask_padding is not None)
        params = replace(params, width=params.width or width, height=params.height or height)
        params.check_result(sizes)
        return params.for_edit(has_mask=self.mask is not None)

    @property
    def edit_strength(self) -> float:
        """The edit's default strength."""
        return float(PARAMETERS["strength"].edit_defaults[self.mask is not None])

    def source(self, params: GenerationParams) -> SourceImage:
        """Prepare the source of a request, whose size must be filled."""
        assert params.width and params.height
        size = params.width, params.height
        picture, mask = self.picture, self.mask
        if params.mask_padding is None:
            picture = picture if picture.size == size else picture.resize(size, SHARP)
            mask = mask and (mask if mask.size == size else mask.resize(size, EVEN))
            mask = mask and blurred(mask, params.mask_blur)
            return SourceImage(filled(picture), mask, self.digests)
        if mask is None:
            return SourceImage(picture.resize(size, SHARP), None, self.digests)
        given, mask = mask, blurred(mask, params.mask_blur)
        # The blur may leave nothing of a small or faint mask; then the picture stays as it is.
        part = mask if mask.getbbox() else given
        box = around(part, params.mask_padding, params.width / params.height)
        text = json.dumps([*self.digests.items(), picture.size, box, params.mask_blur])
        key = hashlib.sha256(text.encode()).hexdigest()
        whole = WholeImage(*self.files, picture.size, box, params.mask_blur or 0, key)
        # The filter reads pixels around the box too.
        margin = math.ceil(3 * max(1, (box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1]))
        picture = filled(picture, grown(box, margin + 1, picture.size))
        image, mask = picture.resize(size, SHARP, box), mask.resize(size, EVEN, box)
        return SourceImage(image, mask, self.digests, whole)


def decode(data: bytes, field: str) -> Image.Image:
    """Decode an untrusted image and turn it upright. The header is checked first."""
    needed = f"must be a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file"
    try:
        with opened(data) as image:
            wrong = unfit(image)
            if wrong is None:
                image.load()
                ImageOps.exif_transpose(image, in_place=True)
                return image
    except TooLarge as error:
        pixels = int(str(error) or 0) or None
        raise InvalidParams(field, pixels, f"must have at most {MAX_PIXELS} pixels") from None
    except BrokenPicture as error:
        raise InvalidParams(field, f"{len(data)} bytes", f"{needed} ({error})") from None
    raise InvalidParams(field, *wrong)


def unfit(image: Image.Image) -> tuple[str, str] | None:
    """Return an unsupported property from the header, and what is supported; None if all is."""
    if image.width * image.height > MAX_PIXELS:
        return f"{image.width}x{image.height}", f"must have at most {MAX_PIXELS} pixels"
    if getattr(image, "is_animated", False):
        return "animated", "must be a single picture"
    # Pillow silently truncates 16-bit colour to 8 bits.
    mode = next(
        (str(tile[3]) for tile in getattr(image, "tile", ()) if ";16" in str(tile[3])), image.mode
    )
    if mode not in MODES:
        return mode, "must be grey or RGB with 8 bits a channel"
    if mode in ("P", "PA") and image.palette is None:
        return "a palette image without a palette", "must be a PNG with a PLTE chunk"
    return None


def white_where_masked(mask: Image.Image) -> Image.Image:
    """Return a mask that is white where the image changes, from a client's mask that is transparent
    there, as with OpenAI's clients, or white."""
    return transparent(mask) or (mask if mask.mode == "L" else mask.convert("L"))


def transparent(picture: Image.Image) -> Image.Image | None:
    """Return a mask, white where the image is transparent; None for an opaque image."""
    if not picture.has_transparency_data:
        return None
    alpha = picture.convert("RGBA").getchannel("A")
    return None if alpha.getextrema() == (255, 255) else ImageOps.invert(alpha)


def blurred(mask: Image.Image, radius: float | None) -> Image.Image:
    return mask.filter(ImageFilter.GaussianBlur(radius)) if radius else mask


def filled(picture: Image.Image, seen: Box | None = None) -> Image.Image:
    """Fill transparent holes with the colours around them, so that the model draws no hard edge.
    `seen`: the part whose holes are filled; all by default."""
    if picture.mode != "RGBA":
        return picture
    whole = picture.convert("RGB")
    left, top, right, bottom = seen or (0, 0, *picture.size)
    holes = ImageOps.invert(picture.getchannel("A").crop((left, top, right, bottom))).getbbox()
    if holes is not None:
        box = left + holes[0], top + holes[1], left + holes[2], top + holes[3]
        near = grown(box, REACH, picture.size)
        whole.paste(spread(picture.crop(near)), near)
    return whole


def spread(picture: Image.Image) -> Image.Image:
    """Spread the colours into the transparent parts."""
    whole, premultiplied = Image.new("RGBA", picture.size), picture.convert("RGBa")
    for radius in SPREAD:
        blurred = premultiplied.filter(ImageFilter.GaussianBlur(radius)).convert("RGBA")
        for _ in range(REPEATS):
            whole = Image.alpha_composite(whole, blurred)
    return Image.alpha_composite(whole, picture).convert("RGB")


def around(mask: Image.Image, padding: int, aspect: float) -> Box:
    """Return the box of the masked part with padding, extended to the aspect if possible."""
    masked = mask.getbbox()
    assert masked is not None
    left, top, right, bottom = grown(masked, padding, mask.size)
    across, down = right - left, bottom - top
    left, right = stretch(left, right, max(round(down * aspect), across), mask.width)
    top, bottom = stretch(top, bottom, max(round(across / aspect), down), mask.height)
    return left, top, right, bottom


def grown(box: Box, margin: int, size: tuple[int, int]) -> Box:
    """Return the box with a margin, cut to an image of this size."""
    left, right = stretch(box[0] - margin, box[2] + margin, 0, size[0])
    top, bottom = stretch(box[1] - margin, box[3] + margin, 0, size[1])
    return left, top, right, bottom


def stretch(low: int, high: int, length: int, most: int) -> tuple[int, int]:
    """Extend an interval around its middle to a length, then shift and cut it to 0 … `most`."""
    missing = max(length - (high - low), 0)
    low, high = low - missing // 2, high + missing - missing // 2
    if length:
        moved = max(-low, 0) - max(high - most, 0)
        low, high = low + moved, high + moved
    return max(low, 0), min(high, most)


def nearest(side: float, sizes: Sizes) -> int:
    rounded = round(side / sizes.multiple) * sizes.multiple
    return min(max(rounded, sizes.minimum), sizes.maximum)
