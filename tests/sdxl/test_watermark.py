"""A watermark is found after usual changes to a picture, and never in a picture without it."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from eval.measuring.psnr import psnr_db
from sdxl.mini.scenes import draw, sample_scene
from sdxl.picture_files import file_of
from sdxl.watermark import FOUND, TILE, Pixels, find, mark, pattern

COLOURS = {"white": (255, 255, 255), "black": (0, 0, 0), "red": (255, 0, 0), "grey": (128,) * 3}
LEAST_DB = 40.0
PATTERN = "b66f380e9377b21655f8d0d16cf3d98f4f5680b3d7ac29e69c017f8c8c50d69a"
MARKED = "009dae2b881b3ec63fe5cf7aed3749d168ee29240efefeebeb52e1e3747a2308"


def plain(colour: tuple[int, ...], side: int = 128) -> Pixels:
    return np.full((side, side, 3), colour, np.uint8)


def scene(seed: int) -> Pixels:
    return np.asarray(draw(sample_scene(np.random.default_rng(seed)), seed))


def rough(side: int, seed: int = 0) -> Pixels:
    """Return noise with the same strength at every frequency, which no photograph has."""
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def photograph() -> Pixels:
    from matplotlib import get_data_path

    with Image.open(Path(get_data_path()) / "sample_data" / "grace_hopper.jpg") as image:
        return np.asarray(image.convert("RGB"))


PICTURES: dict[str, Callable[[], Pixels]] = {
    **{name: partial(plain, colour) for name, colour in COLOURS.items()},
    "white, 1024 pixels": lambda: plain(COLOURS["white"], 1024),
    "noise, 1024 pixels": lambda: rough(1024),
    "a photograph": photograph,
    **{f"scene {seed}": partial(scene, seed) for seed in range(4)},
}


def through_jpeg(pixels: Pixels) -> Pixels:
    file = file_of(Image.fromarray(pixels), "JPEG", quality=75)
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))


def scaled(pixels: Pixels, by: float) -> Pixels:
    size = tuple(round(side * by) for side in pixels.shape[1::-1])
    return np.asarray(Image.fromarray(pixels).resize((size[0], size[1]), Image.Resampling.LANCZOS))


def cropped(pixels: Pixels, leaves: float) -> Pixels:
    """Cut out this share of the area, beginning inside a tile."""
    height, width = (round(side * math.sqrt(leaves)) for side in pixels.shape[:2])
    top, left = (pixels.shape[0] - height) // 3, (pixels.shape[1] - width) // 3
    return pixels[top : top + height, left : left + width]


CHANGES: dict[str, Callable[[Pixels], Pixels]] = {
    "nothing": lambda pixels: pixels,
    "JPEG of quality 75": through_jpeg,
    "half the size": lambda pixels: scaled(pixels, 0.5),
    "three quarters of the size": lambda pixels: scaled(pixels, 0.75),
    "twice the size": lambda pixels: scaled(pixels, 2),
    "a crop that leaves a quarter": lambda pixels: cropped(pixels, 0.25),
    "a crop that takes a quarter": lambda pixels: cropped(pixels, 0.75),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_mark_is_found_after_each_change_and_is_40_db_below_the_picture(name: str) -> None:
    original = PICTURES[name]()
    marked = mark(original)
    assert psnr_db(original, marked) >= LEAST_DB
    scores = {change: find(make(marked)).score for change, make in CHANGES.items()}
    assert min(scores.values()) >= FOUND, scores


@pytest.mark.parametrize("name", PICTURES)
def test_no_picture_without_it_looks_marked(name: str) -> None:
    original = PICTURES[name]()
    for change in ("nothing", "JPEG of quality 75"):
        assert find(CHANGES[change](original)).score < FOUND, change


def test_a_repeated_pattern_of_the_same_size_does_not_look_marked() -> None:
    for seed in range(4):
        tile = rough(TILE, seed)
        assert find(np.tile(tile, (4, 4, 1))).score < FOUND


@settings(max_examples=30, deadline=None)
@given(
    side=st.tuples(st.integers(1, 150), st.integers(1, 150)),
    contrast=st.integers(0, 255),
    seed=st.integers(0, 1000),
)
def test_any_size_can_be_marked(side: tuple[int, int], contrast: int, seed: int) -> None:
    drawn = np.random.default_rng(seed).integers(0, contrast + 1, (*side, 3), dtype=np.uint8)
    marked = mark(drawn)
    assert marked.shape == drawn.shape and marked.dtype == np.uint8
    if min(side) >= TILE:
        assert psnr_db(drawn, marked) >= LEAST_DB
    assert math.isfinite(find(marked).score)


def test_hashes_show_that_the_pattern_never_changes() -> None:
    """Another pattern would not find the marks of earlier releases."""
    tile: NDArray[np.float32] = pattern().tile
    assert hashlib.sha256(np.rint(tile * 64).astype("<i2").tobytes()).hexdigest() == PATTERN
    assert hashlib.sha256(mark(scene(0)).tobytes()).hexdigest() == MARKED


def test_the_chance_of_an_unmarked_picture_is_near_one_and_of_a_marked_one_tiny() -> None:
    original = scene(0)
    assert find(original).chance > 0.01
    assert find(mark(original)).chance < 1e-30
