"""Untrusted pictures as the source of an edit: each is read, or refused with one clear error."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from sdxl.params import GenerationParams, InvalidParams, Sizes
from sdxl.picture_files import file_of
from sdxl.source import MAX_PIXELS, GivenImage, around, spread

SIZES = Sizes(default=128, minimum=64, maximum=512)
saved = file_of


def plain(width: int = 80, height: int = 60, colour: str = "red") -> Image.Image:
    return Image.new("RGB", (width, height), colour)


def png(width: int, height: int, pixels: bytes, *, depth: int = 8, colours: int = 2) -> bytes:
    """Make a PNG whose header names this size, bit depth and colour type."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(pixels))
    return b"\x89PNG\r\n\x1a\n" + head + body + chunk(b"IEND", b"")


def bomb(width: int, height: int) -> bytes:
    """Return a small file whose header claims a very large picture."""
    return png(width, height, bytes(1000))


def animated(format: str) -> bytes:
    return saved(plain(), format, save_all=True, append_images=[plain(colour="blue")])


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>'


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: b"", "must be a PNG, JPEG or WEBP file"),
        (lambda: b"not a picture", "must be a PNG, JPEG or WEBP file"),
        (lambda: SVG, "must be a PNG, JPEG or WEBP file"),
        (lambda: saved(plain(), "TIFF"), "must be a PNG, JPEG or WEBP file"),
        (lambda: saved(plain(), "GIF"), "must be a PNG, JPEG or WEBP file"),
        (lambda: saved(plain(200, 200), "JPEG")[:500], "must be a PNG, JPEG or WEBP file"),
        (lambda: saved(plain(200, 200))[:-80], "must be a PNG, JPEG or WEBP file"),
        (lambda: bomb(60_000, 60_000), f"at most {MAX_PIXELS} pixels, got 3600000000"),
        (lambda: bomb(6_000, 6_000), f"at most {MAX_PIXELS} pixels"),
        (lambda: animated("PNG"), "must be a single picture"),
        (lambda: animated("WEBP"), "must be a single picture"),
        (lambda: saved(plain().convert("CMYK"), "JPEG"), "grey or RGB .*CMYK"),
        (lambda: saved(Image.new("I;16", (80, 60))), "8 bits a channel, got .I;16"),
        (lambda: png(1, 1, bytes(7), depth=16), "8 bits a channel, got .RGB;16B"),
        (lambda: png(1, 1, bytes(9), depth=16, colours=6), "8 bits a channel, got .RGBA;16B"),
        (lambda: png(1, 1, bytes(5), depth=16, colours=4), "8 bits a channel, got .LA;16B"),
        (
            lambda: png(1, 1, bytes(2), colours=3),
            "PNG with a PLTE chunk, got .a palette image without",
        ),
    ],
)
@pytest.mark.parametrize("field", ["image", "mask"])
def test_pictures_that_cannot_be_edited_are_refused(
    field: str, data: Callable[[], bytes], message: str
) -> None:
    good = saved(plain())
    files = (data(), None) if field == "image" else (good, data())
    with pytest.raises(InvalidParams, match=f"{field} .*({message})") as caught:
        GivenImage.read(*files)
    assert caught.value.field == field and "object at" not in str(caught.value)


def test_a_picture_is_turned_as_its_camera_was() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    given = GivenImage.read(saved(plain(80, 60), "JPEG", exif=exif))
    assert given.picture.size == (60, 80)


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA"])
def test_every_usual_kind_of_picture_is_read(mode: str) -> None:
    given = GivenImage.read(saved(plain().convert(mode)))
    assert (given.picture.mode, given.mask) == ("RGB", None)


def test_a_mask_is_white_or_transparent_where_to_edit() -> None:
    white = Image.new("L", (80, 60), 0)
    white.paste(255, (10, 10, 30, 30))
    clear = Image.new("RGBA", (80, 60), (0, 0, 0, 255))
    clear.paste((0, 0, 0, 0), (10, 10, 30, 30))
    masks = [GivenImage.read(saved(plain()), saved(mask)).mask for mask in (white, clear)]
    # An image's own transparency takes the place of a mask.
    masks.append(GivenImage.read(saved(clear)).mask)
    for mask in masks:
        assert mask is not None
        assert np.array_equal(np.asarray(mask), np.asarray(white))


def test_the_colours_around_a_hole_are_spread_into_it() -> None:
    """The colours outside the hole stay as they were."""
    canvas = Image.new("RGBA", (192, 128), (0, 0, 0, 0))
    picture = plain(128, 128, "blue")
    canvas.paste(picture, (0, 0))
    params = GenerationParams("a", width=192, height=128, strength=1.0)
    part = np.asarray(GivenImage.read(saved(canvas)).source(params).image)
    assert np.array_equal(part[:, :128], np.asarray(picture))
    assert (np.abs(part.astype(int) - (0, 0, 255)) <= 8).all()
    # A larger mask than the hole changes nothing here.
    mask = Image.new("L", canvas.size, 255)
    masked = GivenImage.read(saved(canvas), saved(mask)).source(params)
    assert np.array_equal(np.asarray(masked.image), part)


def test_colours_spread_only_around_holes_and_as_in_the_whole_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sdxl.source.SPREAD", (16, 4, 2))
    monkeypatch.setattr("sdxl.source.REACH", 48)
    picture = Image.effect_noise((600, 400), 90).convert("RGBA")
    clear = Image.new("L", picture.size, 255)
    clear.paste(0, (60, 50, 90, 70))
    clear.paste(128, (95, 50, 99, 60))
    far = clear.copy()
    far.paste(0, (580, 380, 600, 400))
    params = GenerationParams("a", width=64, height=64, mask_padding=8, strength=1.0)
    area: list[int] = []

    def counted(part: Image.Image) -> Image.Image:
        area.append(math.prod(part.size))
        return spread(part)

    for alpha in (clear, far):
        picture.putalpha(alpha)
        expected = np.asarray(spread(picture))
        with monkeypatch.context() as patched:
            patched.setattr("sdxl.source.spread", counted)
            white = Image.new("L", picture.size, 0)
            white.paste(255, (60, 50, 90, 70))
            source = GivenImage.read(saved(picture), saved(white)).source(params)
        assert source.whole is not None and area.pop() < 200 * 200
        box = source.whole.box
        whole = Image.fromarray(expected).resize((64, 64), Image.Resampling.LANCZOS, box)
        assert np.array_equal(np.asarray(source.image), np.asarray(whole))
        assert np.array_equal(np.asarray(source.whole.decoded().image), expected)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Image.new("L", (79, 60), 255), "have the image's size, 80x60, got '79x60"),
        (Image.new("L", (80, 60), 0), "must have a transparent or white part"),
    ],
)
def test_a_mask_that_fits_nothing_is_refused(mask: Image.Image, message: str) -> None:
    with pytest.raises(InvalidParams, match=f"mask .*{message}"):
        GivenImage.read(saved(plain()), saved(mask))


@pytest.mark.parametrize(
    ("picture", "size"),
    [
        ((128, 128), (128, 128)),
        ((101, 91), (104, 88)),
        ((96, 160), (96, 160)),
        ((4000, 3000), (144, 112)),
        ((20, 40), (64, 128)),
        ((5000, 10), (512, 64)),
    ],
)
def test_a_picture_keeps_its_shape_at_no_more_than_the_model_s_pixels(
    picture: tuple[int, int], size: tuple[int, int]
) -> None:
    given = GivenImage.read(saved(plain(*picture)))
    assert given.size(SIZES, is_part=False) == size


def test_the_masked_part_is_cut_out_as_diffusers_cuts_it() -> None:
    from diffusers.image_processor import VaeImageProcessor

    generator = np.random.default_rng(0)
    for _ in range(50):
        width, height = (int(n) for n in generator.integers(60, 300, 2))
        left, top = int(generator.integers(0, width - 8)), int(generator.integers(0, height - 8))
        mask = Image.new("L", (width, height), 0)
        mask.paste(255, (left, top, left + 8, top + 8))
        padding = int(generator.integers(0, 40))
        found = around(mask, padding, 1.0)
        theirs = VaeImageProcessor.get_crop_region(mask, 128, 128, pad=padding)
        assert np.abs(np.subtract(found, theirs)).max() <= 1, (found, theirs)


@pytest.mark.parametrize(("value", "side", "blur"), [(255, 1, 64), (2, 3, 4)])
def test_a_mask_that_its_blur_removes_changes_nothing(value: int, side: int, blur: int) -> None:
    picture, mask = Image.effect_noise((90, 70), 60).convert("RGB"), Image.new("L", (90, 70), 0)
    mask.paste(value, (20, 30, 20 + side, 30 + side))
    given = GivenImage.read(saved(picture), saved(mask))
    params = GenerationParams("a", width=64, height=64, mask_padding=8, mask_blur=blur)
    source = given.source(params)
    assert source.whole is not None and source.whole.box == around(mask, 8, 1.0)
    green = Image.new("RGB", (64, 64), (0, 255, 0))
    whole = given.source(replace(params, mask_padding=None, width=96, height=64))
    assert whole.mask is not None
    assert source.whole.decoded().mask.getbbox() is whole.mask.getbbox() is None
    assert np.array_equal(np.asarray(source.pasted(green)), np.asarray(picture))


def test_pasting_back_changes_only_the_masked_part() -> None:
    picture = Image.effect_noise((90, 70), 60).convert("RGB")
    mask = Image.new("L", picture.size, 0)
    mask.paste(255, (20, 20, 50, 40))
    params = GenerationParams("a", width=128, height=128, mask_padding=8, mask_blur=2, strength=1.0)
    source = GivenImage.read(saved(picture), saved(mask)).source(params)
    assert source.size == (128, 128) and source.whole is not None
    made = source.pasted(Image.new("RGB", (128, 128), (0, 255, 0)))
    whole = source.whole.decoded()
    white = Image.new("L", picture.size, 0)
    white.paste(whole.mask, whole.box[:2])
    before, after, shade = map(np.asarray, (picture, made, white))
    assert np.array_equal(before[shade == 0], after[shade == 0])
    assert (after[shade == 255] == (0, 255, 0)).all() and (shade == 255).any()
    # The whole image, composed at once, has the same bytes.
    left, top, right, bottom = whole.box
    green = picture.copy()
    green.paste(Image.new("RGB", (right - left, bottom - top), (0, 255, 0)), (left, top))
    assert np.array_equal(after, np.asarray(Image.composite(green, picture, white)))
