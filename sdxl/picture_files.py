"""Picture files that anybody may have made: opened, or refused with one error.

It does not know what is in them. Importing it loads no PyTorch.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP")
"""The ones that are written here; every other parser of Pillow's would be one more to trust."""


class BrokenPicture(ValueError):
    """A file that is no picture, or a damaged one."""


@contextmanager
def opened(data: bytes) -> Iterator[Image.Image]:
    """The picture in these bytes. Raises BrokenPicture alone, for what is read from it inside as
    well: a damaged file makes Pillow raise almost anything, its own AttributeError included."""
    try:
        with warnings.catch_warnings():
            # What Pillow warns of, its callers judge: a size, a chunk that is cut off.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                yield image
    except Exception as error:
        raise BrokenPicture(f"not a picture ({type(error).__name__}: {error})") from error
