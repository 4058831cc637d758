"""The picture that another one is made from, and the mask that says where: read, checked, brought
to size; and what comes of it, pasted back.

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
"""of a picture that is given; they are counted before it is decoded"""
SPREAD, REPEATS = (256, 64, 16, 4, 2), 4
"""pixels that colours are spread over into a hole, the widest first; each is laid on so often"""
DIGESTS = ("image_sha256", "mask_sha256")
"""what a result's metadata says of the files that it was made from"""
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
"""8 bits a channel, and colours that are the screen's"""
SHARP, EVEN = Image.Resampling.LANCZOS, Image.Resampling.BILINEAR
"""The second is for masks: it does not ring."""
Box = tuple[int, int, int, int]
"""left, top, right, bottom"""


@dataclass(frozen=True, eq=False)
class WholeImage:
    """The image that an "only masked" edit changes a part of. It stays compressed: decoded, one of
    33 megapixels takes 170 MB, so it is decoded for each result and let go."""

    image: bytes
    mask: bytes | None
    """The files as the client sent them."""
    size: tuple[int, int]
    box: Box
    blur: int
    """Pixels that the mask is blurred by."""
    key: str
    """Digest of all of these."""

    def decoded(self) -> DecodedWhole:
        given = GivenImage.read(self.image, self.mask)
        assert given.mask is not None
        image = filled(given.picture) if given.picture.mode == "RGBA" else given.picture
        return DecodedWhole(image, blurred(given.mask, self.blur).crop(self.box), self.box)


@dataclass(frozen=True)
class DecodedWhole:
    image: Image.Image
    mask: Image.Image
    """Of the box alone."""
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
    """The image that an edit begins with, at the size that it is edited in."""

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
        """`made` in its place; where the mask is black nothing has changed."""
        if self.whole is not None:
            with self.whole.decoded().pasted(made) as image:
                return image.copy()
        if self.mask is None:
            return made
        return Image.composite(made.resize(self.size, SHARP), self.image, self.mask)


@dataclass(frozen=True)
class GivenImage:
    """A picture and its mask as somebody gave them, decoded and upright."""

    picture: Image.Image
    """RGBA if some of it is transparent: colours are spread into that, whatever the mask"""
    mask: Image.Image | None
    digests: Mapping[str, str]
    """of the files, by the names that a result's metadata has for them"""
    files: tuple[bytes, bytes | None]
    """Image and mask, compressed."""

    @classmethod
    def read(cls, data: bytes, mask: bytes | None = None) -> GivenImage:
        """Raises InvalidParams for what is no picture that can be worked at. Without a mask, a
        picture's own transparency is one."""
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
        """What to work at where nobody says: the picture's own size, with no more pixels than the
        model's own; a masked part is enlarged to that."""
        if is_part:
            return sizes.default, sizes.default
        across, down = self.picture.size
        scale = min(1.0, sizes.default / math.sqrt(across * down))
        scale = max(scale, sizes.minimum / min(across, down))
        return nearest(across * scale, sizes), nearest(down * scale, sizes)

    def sized(self, params: GenerationParams, sizes: Sizes) -> GenerationParams:
        """A request with the size and the strength that it leaves open, checked at its largest."""
        width, height = self.size(sizes, is_part=params.mask_padding is not None)
        params = replace(params, width=params.width or width, height=params.height or height)
        params.check_result(sizes)
        return params.for_edit(has_mask=self.mask is not None)

    @property
    def edit_strength(self) -> float:
        """Of who names none."""
        return float(PARAMETERS["strength"].edit_defaults[self.mask is not None])

    def source(self, params: GenerationParams) -> SourceImage:
        """For a request with its size filled."""
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
    """The picture in a file that anybody may have made, upright. Its header is judged first."""
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
    """What a picture has that it may not have, and what it may, as far as its header says."""
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
    """From a mask that is transparent there, as OpenAI's clients send it, or white."""
    return transparent(mask) or (mask if mask.mode == "L" else mask.convert("L"))


def transparent(picture: Image.Image) -> Image.Image | None:
    """White where it is; None for a picture that is nowhere."""
    if not picture.has_transparency_data:
        return None
    alpha = picture.convert("RGBA").getchannel("A")
    return None if alpha.getextrema() == (255, 255) else ImageOps.invert(alpha)


def blurred(mask: Image.Image, radius: float | None) -> Image.Image:
    return mask.filter(ImageFilter.GaussianBlur(radius)) if radius else mask


def filled(picture: Image.Image) -> Image.Image:
    """With the colours around a hole spread into it: from a hard edge the model would draw one."""
    whole = Image.new("RGBA", picture.size)
    for radius in SPREAD:
        blurred = picture.convert("RGBa").filter(ImageFilter.GaussianBlur(radius)).convert("RGBA")
        for _ in range(REPEATS):
            whole.alpha_composite(blurred)
    whole.alpha_composite(picture)
    return whole.convert("RGB")


def around(mask: Image.Image, padding: int, aspect: float) -> Box:
    """The masked part with so much around it, grown to the aspect as far as there is room."""
    found = mask.getbbox()
    assert found is not None
    left, right = stretch(found[0] - padding, found[2] + padding, 0, mask.width)
    top, bottom = stretch(found[1] - padding, found[3] + padding, 0, mask.height)
    across, down = right - left, bottom - top
    left, right = stretch(left, right, max(round(down * aspect), across), mask.width)
    top, bottom = stretch(top, bottom, max(round(across / aspect), down), mask.height)
    return left, top, right, bottom


def stretch(low: int, high: int, length: int, most: int) -> tuple[int, int]:
    """An interval of at least this length about the same middle, moved and cut to 0 … most."""
    missing = max(length - (high - low), 0)
    low, high = low - missing // 2, high + missing - missing // 2
    if length:
        moved = max(-low, 0) - max(high - most, 0)
        low, high = low + moved, high + moved
    return max(low, 0), min(high, most)


def nearest(side: float, sizes: Sizes) -> int:
    rounded = round(side / sizes.multiple) * sizes.multiple
    return min(max(rounded, sizes.minimum), sizes.maximum)
