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
"""radii in pixels by which colours spread into a hole, the widest first; each is applied so
often"""
DIGESTS = ("image_sha256", "mask_sha256")
"""keys of a result's metadata for the digests of its source files"""
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
"""8 bits a channel, screen colours"""
SHARP, EVEN = Image.Resampling.LANCZOS, Image.Resampling.BILINEAR
"""The second is for masks: it does not ring."""
Box = tuple[int, int, int, int]
"""left, top, right, bottom"""


@dataclass(frozen=True, eq=False)
class WholeImage:
    """The whole image of an "only masked" edit. It stays compressed: an image of 33 megapixels
    takes 170 MB, so it is decoded for each result and released."""

    image: bytes
    mask: bytes | None
    """The client's files."""
    size: tuple[int, int]
    box: Box
    blur: int
    """Radius of the mask's blur in pixels."""
    key: str
    """Digest of files and settings."""

    def decoded(self) -> DecodedWhole:
        given = GivenImage.read(self.image, self.mask)
        assert given.mask is not None
        image = filled(given.picture) if given.picture.mode == "RGBA" else given.picture
        return DecodedWhole(image, blurred(given.mask, self.blur).crop(self.box), self.box)


@dataclass(frozen=True)
class DecodedWhole:
    image: Image.Image
    mask: Image.Image
    """The mask of the box."""
    box: Box

    @contextmanager
    def pasted(self, made: Image.Image) -> Iterator[Image.Image]:
        """The whole image with `made` in its box, as far as the mask is white. Without a copy of
        it: the next result is pasted into the same image."""
        left, top, right, bottom = self.box
        before = self.image.crop(self.box)
        made = made.resize((right - left, bottom - top), SHARP)
        self.image.paste(made, (left, top), self.mask)
        del made
        try:
            yield self.image
        finally:
            self.image.paste(before, (left, top))


@dataclass(frozen=True, eq=False)
class SourceImage:
    """The image that an edit starts from, at the size of the edit."""

    image: Image.Image
    mask: Image.Image | None
    """White where the image changes; None: everywhere."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the client's files, for the result's metadata."""
    whole: WholeImage | None = None
    """The image that the result is pasted into, if `image` is a part of one."""

    @property
    def size(self) -> tuple[int, int]:
        return self.image.size

    def pasted(self, made: Image.Image) -> Image.Image:
        """Paste `made` in its place; the image stays unchanged where the mask is black."""
        if self.whole is not None:
            with self.whole.decoded().pasted(made) as image:
                return image.copy()
        if self.mask is None:
            return made
        return Image.composite(made.resize(self.size, SHARP), self.image, self.mask)


@dataclass(frozen=True)
class GivenImage:
    """An image and its mask as the client sent them, decoded and upright."""

    picture: Image.Image
    """RGBA if a part is transparent: colours are spread into that part even without a mask"""
    mask: Image.Image | None
    digests: Mapping[str, str]
    """digests of the files, by their keys in a result's metadata"""
    files: tuple[bytes, bytes | None]
    """Image and mask, compressed."""

    @classmethod
    def read(cls, data: bytes, mask: bytes | None = None) -> GivenImage:
        """Read the files, or raise InvalidParams for an image that cannot be edited. Without a
        mask, transparency is the mask."""
        picture = decode(data, "image")
        own = transparent(picture)
        white = own if mask is None else white_where_masked(decode(mask, "mask"))
        if white is not None and white.size != picture.size:
            needed = "must have the image's size, {}x{}".format(*picture.size)
            raise InvalidParams("mask", "{}x{}".format(*white.size), needed)
        if white is not None and white.getbbox() is None:
            raise InvalidParams("mask", "all of it kept", "must have a transparent or white part")
        files = {DIGESTS[0]: data} | ({} if mask is None else {DIGESTS[1]: mask})
        digests = {name: hashlib.sha256(file).hexdigest() for name, file in files.items()}
        mode = "RGB" if own is None else "RGBA"
        picture = picture if picture.mode == mode else picture.convert(mode)
        return cls(picture, white, digests, (data, mask))

    def size(self, sizes: Sizes, *, is_part: bool) -> tuple[int, int]:
        """Return the default size of the edit: the image's own, with at most the model's usual
        number of pixels; a masked part is enlarged to that."""
        if is_part:
            return sizes.default, sizes.default
        across, down = self.picture.size
        scale = min(1.0, sizes.default / math.sqrt(across * down))
        scale = max(scale, sizes.minimum / min(across, down))
        return nearest(across * scale, sizes), nearest(down * scale, sizes)

    def sized(self, params: GenerationParams, sizes: Sizes) -> GenerationParams:
        """Fill the request's size and strength, and check the largest size."""
        width, height = self.size(sizes, is_part=params.mask_padding is not None)
        params = replace(params, width=params.width or width, height=params.height or height)
        params.check_result(sizes)
        return params.for_edit(has_mask=self.mask is not None)

    @property
    def edit_strength(self) -> float:
        """The default strength."""
        return float(PARAMETERS["strength"].edit_defaults[self.mask is not None])

    def source(self, params: GenerationParams) -> SourceImage:
        """Prepare the source for a request whose size is filled."""
        assert params.width and params.height
        size = params.width, params.height
        picture, mask = self.picture, self.mask
        if params.mask_padding is None:
            picture = picture if picture.size == size else picture.resize(size, SHARP)
            mask = mask and (mask if mask.size == size else mask.resize(size, EVEN))
        picture = filled(picture) if picture.mode == "RGBA" else picture
        mask = mask and blurred(mask, params.mask_blur)
        if params.mask_padding is None:
            return SourceImage(picture, mask, self.digests)
        if mask is None:
            return SourceImage(picture.resize(size, SHARP), None, self.digests)
        box = around(mask, params.mask_padding, params.width / params.height)
        text = json.dumps([*self.digests.items(), picture.size, box, params.mask_blur])
        key = hashlib.sha256(text.encode()).hexdigest()
        whole = WholeImage(*self.files, picture.size, box, params.mask_blur or 0, key)
        image, mask = picture.resize(size, SHARP, box), mask.resize(size, EVEN, box)
        return SourceImage(image, mask, self.digests, whole)


def decode(data: bytes, field: str) -> Image.Image:
    """Decode an untrusted image, upright. Its header is checked first."""
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
    """Return what the header shows as unsupported, and what is supported."""
    if image.width * image.height > MAX_PIXELS:
        return f"{image.width}x{image.height}", f"must have at most {MAX_PIXELS} pixels"
    if getattr(image, "is_animated", False):
        return "animated", "must be a single picture"
    # Pillow reads 16 bits of colour as 8, without rounding.
    mode = next(
        (str(tile[3]) for tile in getattr(image, "tile", ()) if ";16" in str(tile[3])), image.mode
    )
    if mode not in MODES:
        return mode, "must be grey or RGB with 8 bits a channel"
    if mode in ("P", "PA") and image.palette is None:
        return "a palette image without a palette", "must be a PNG with a PLTE chunk"
    return None


def white_where_masked(mask: Image.Image) -> Image.Image:
    """Return the mask, white where the image changes. It was sent transparent there, as OpenAI's
    clients do, or white."""
    return transparent(mask) or (mask if mask.mode == "L" else mask.convert("L"))


def transparent(picture: Image.Image) -> Image.Image | None:
    """Return a mask, white where the image is transparent; None for an opaque image."""
    if not picture.has_transparency_data:
        return None
    alpha = picture.convert("RGBA").getchannel("A")
    return None if alpha.getextrema() == (255, 255) else ImageOps.invert(alpha)


def blurred(mask: Image.Image, radius: float | None) -> Image.Image:
    return mask.filter(ImageFilter.GaussianBlur(radius)) if radius else mask


def filled(picture: Image.Image) -> Image.Image:
    """Fill holes with the colours around them: the model would draw a hard edge."""
    whole = Image.new("RGBA", picture.size)
    for radius in SPREAD:
        blurred = picture.convert("RGBa").filter(ImageFilter.GaussianBlur(radius)).convert("RGBA")
        for _ in range(REPEATS):
            whole.alpha_composite(blurred)
    whole.alpha_composite(picture)
    return whole.convert("RGB")


def around(mask: Image.Image, padding: int, aspect: float) -> Box:
    """Return the box of the masked part with padding, grown to the aspect as far as the image
    allows."""
    found = mask.getbbox()
    assert found is not None
    left, right = stretch(found[0] - padding, found[2] + padding, 0, mask.width)
    top, bottom = stretch(found[1] - padding, found[3] + padding, 0, mask.height)
    across, down = right - left, bottom - top
    left, right = stretch(left, right, max(round(down * aspect), across), mask.width)
    top, bottom = stretch(top, bottom, max(round(across / aspect), down), mask.height)
    return left, top, right, bottom


def stretch(low: int, high: int, length: int, most: int) -> tuple[int, int]:
    """Return an interval of at least this length around the same middle, shifted and cut to 0 …
    most."""
    missing = max(length - (high - low), 0)
    low, high = low - missing // 2, high + missing - missing // 2
    if length:
        moved = max(-low, 0) - max(high - most, 0)
        low, high = low + moved, high + moved
    return max(low, 0), min(high, most)


def nearest(side: float, sizes: Sizes) -> int:
    rounded = round(side / sizes.multiple) * sizes.multiple
    return min(max(rounded, sizes.minimum), sizes.maximum)
