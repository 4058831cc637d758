"""Writes picture files, and opens untrusted ones. Importing it loads no PyTorch."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from PIL import Image, UnidentifiedImageError

EXIF_IFD, USER_COMMENT = 0x8769, 0x9286
CODED = {b"ASCII\0\0\0": "ascii", b"UNICODE\0": "utf-16-be"}
"""Python's names of a user comment's encodings"""
MAX_TEXT = 100_000
FORMATS = ("PNG", "JPEG", "WEBP")
"""The formats that this project writes; Pillow's other parsers are not trusted."""


class BrokenPicture(ValueError):
    """A damaged picture file, or a file of another kind."""


class TooLarge(BrokenPicture):
    """A picture with more pixels than Pillow opens; the message is the number of pixels."""


@contextmanager
def opened(data: bytes) -> Iterator[Image.Image]:
    """Open a picture from bytes. Every error of Pillow, also within the block, becomes
    BrokenPicture: for a damaged file it can be of any class, even AttributeError."""
    try:
        with warnings.catch_warnings():
            # Callers check what Pillow only warns of, such as the size.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                yield image
    except UnidentifiedImageError as error:
        # Pillow's message names a Python object.
        raise BrokenPicture("not a picture") from error
    except Image.DecompressionBombError as error:
        numbers = re.findall(r"\d+", str(error))
        raise TooLarge(numbers[0] if numbers else "") from error
    except Exception as error:
        raise BrokenPicture(f"not a picture ({error})") from error


def file_of(picture: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def read_texts(data: bytes) -> dict[str, str]:
    """Read a picture's text chunks by name; `parameters` also from the user comment of a JPEG or
    WebP. Raise BrokenPicture."""
    with opened(data) as image:
        texts = {
            str(name): value[:MAX_TEXT]
            for name, value in image.info.items()
            if isinstance(value, str)
        }
        # A PNG's own getexif would decode all pixels, of which there may be many.
        comment = Image.Image.getexif(image).get_ifd(EXIF_IFD).get(USER_COMMENT)
    if "parameters" not in texts and isinstance(comment, bytes):
        encoding = CODED.get(comment[:8], "utf-8")
        text = comment[8:] if comment[:8] in CODED else comment
        texts["parameters"] = text[:MAX_TEXT].decode(encoding, errors="replace")
    return texts
