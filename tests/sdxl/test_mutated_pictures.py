"""An untrusted picture is read, or refused with one of our messages."""

from __future__ import annotations

import random

import numpy as np
import pytest
from PIL import Image

from sdxl import images
from sdxl.params import GenerationParams
from sdxl.picture_files import file_of
from tests.mutants import change_bytes, check_each

PIXELS = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
FORMATS = ("png", "jpeg", "webp")


def picture(format: str) -> bytes:
    params = GenerationParams(
        prompt="une étoile", negative_prompt="円", width=24, height=16, seed=7
    )
    return images.encode(PIXELS, format, {**params.as_dict(), "model": "mini"})


PICTURES = {format: picture(format) for format in FORMATS}


def read_mutant(chance: random.Random) -> None:
    images.read_parameters(change_bytes(PICTURES[chance.choice(FORMATS)], chance))


def test_mutated_pictures_are_read_or_refused() -> None:
    check_each(500, read_mutant)


@pytest.mark.long
def test_many_mutated_pictures_are_read_or_refused() -> None:
    check_each(20_000, read_mutant)


def test_every_error_of_pillow_is_refused_as_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    for raised in (AttributeError, NotImplementedError, RuntimeError, KeyError, MemoryError):

        def fail(*_: object, error: type[Exception] = raised) -> None:
            raise error("from inside a parser")

        monkeypatch.setattr(Image.Image, "getexif", fail)
        with pytest.raises(images.NoParameters, match="not an image"):
            images.read_parameters(PICTURES["jpeg"])


def test_only_the_formats_that_are_written_here_are_opened() -> None:
    with pytest.raises(images.NoParameters, match="not an image"):
        images.read_parameters(file_of(Image.fromarray(PIXELS), "GIF"))
