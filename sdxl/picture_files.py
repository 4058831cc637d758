"""Writes picture files, and opens untrusted ones or refuses them with one error.

It does not know what is in them. Importing it loads no PyTorch.
"""

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
MAX_WORDS = 100_000
FORMATS = ("PNG", "JPEG", "WEBP")
"""The formats that are written here; Pillow's other parsers are not trusted."""


class BrokenPicture(ValueError):
    """A damaged picture file, or another file."""


class TooLarge(BrokenPicture):
    """A picture with more pixels than Pillow opens; the text is their number."""


@contextmanager
def opened(data: bytes) -> Iterator[Image.Image]:
    """Open a picture from bytes. Only BrokenPicture is raised, also for reads inside: a damaged
    file makes Pillow raise almost anything, even AttributeError."""
    try:
        with warnings.catch_warnings():
            # What Pillow warns of, its callers judge: a size, a chunk that is cut off.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                yield image
    except UnidentifiedImageError as error:
        # Its own words name a Python object.
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


def words_of(data: bytes) -> dict[str, str]:
    """Read a picture's text chunks; `parameters` also from the user comment of a JPEG or WebP.
    Raises BrokenPicture."""
    with opened(data) as image:
        words = {
            str(name): value[:MAX_WORDS]
            for name, value in image.info.items()
            if isinstance(value, str)
        }
        comment = image.getexif().get_ifd(EXIF_IFD).get(USER_COMMENT)
    if "parameters" not in words and isinstance(comment, bytes):
        encoding = CODED.get(comment[:8], "utf-8")
        text = comment[8:] if comment[:8] in CODED else comment
        words["parameters"] = text[:MAX_WORDS].decode(encoding, errors="replace")
    return words
