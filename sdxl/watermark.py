"""A mark in the pixels themselves that says: a generator made this. Invisible, and found again in
what was compressed, scaled or cropped.

A pattern of 64 by 64 pixels repeats all over the picture's brightness: waves in a band of middle
frequencies, of equal height and with phases from a hash, so that it looks like faint noise.
Finding it: even out the picture's own contrast, lay all tiles over each other, keep of each wave in
the band its phase alone, and compare with the pattern's phases at every shift. In a picture
without the mark these differences are random whatever it shows, so a score tells how likely chance
is. The pattern is public: with this file anyone can find the mark, put it into other pictures, and
remove it.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float64]
Brightness = NDArray[np.float32]

TILE, BLOCK = 64, 8
NAME = b"sdxl-deepcache: made by a generator"
"""The phases are its hash. Another name is another mark."""
BAND = (0.09, 0.22)
"""Cycles a pixel: coarse enough for half the size and for JPEG, too fine for spots."""
FAINTEST, STRONGEST = 1.25, 5.0
"""Of 255, root mean square: on plain areas, and in the roughest ones, which hide it."""
GAIN = 0.15
"""Strength by a block's own contrast"""
MOST = 2.4
"""Root mean square over the whole picture: 40.5 dB"""
STEP = 1 / 64
"""The pattern is rounded to it: the last digits of a Fourier transform differ between machines."""

ZOOMS = (1.0, 2.0, 4 / 3, 3 / 2, 2 / 3, 1 / 2)
"""factors by which a scaled picture is scaled back"""
WINDOW = 1024
"""Pixels a side, in the middle, that are searched; more says nothing new"""
SMALLEST = 32
REACH = 4
"""Pixels to each side by which a pixel's surroundings are judged"""
GRAIN = 1.0
"""Contrast of 255 that rounding makes in a plain area"""
FOUND = 6.5
"""At this score chance makes one of a million unmarked pictures look marked."""


class Pattern(NamedTuple):
    tile: NDArray[np.float32]
    """mean 0, root mean square 1"""
    waves: NDArray[np.complex128]
    """its Fourier transform, of height 1 in the band, 0 elsewhere"""
    in_all: int
    """waves"""


@dataclass(frozen=True)
class WatermarkFinding:
    score: float
    """In standard deviations of an unmarked picture's"""
    zoom: float

    @property
    def is_found(self) -> bool:
        return self.score >= FOUND

    @property
    def chance(self) -> float:
        """That an unmarked picture scores as much at any shift and zoom."""
        tries = TILE * TILE * len(ZOOMS)
        return min(1.0, tries * math.erfc(max(self.score, 0.0) / math.sqrt(2)) / 2)


def mark(pixels: Pixels) -> Pixels:
    """The same picture with the mark, 40 dB away or more. The same pixels give the same."""
    height, width, _ = pixels.shape
    across, down = -(-width // TILE), -(-height // TILE)
    tile = np.tile(pattern().tile, (down, across))[:height, :width]
    strength = _strengths(pixels).repeat(BLOCK, 0).repeat(BLOCK, 1)[:height, :width]
    change = np.rint(tile * strength).astype(np.int16)
    marked: Pixels = np.clip(pixels + change[..., None], 0, 255).astype(np.uint8)
    return marked


def find(pixels: Pixels) -> WatermarkFinding:
    """How much a picture looks marked, at the zoom where it does most."""
    brightness = pixels.astype(np.float32) @ np.array((0.299, 0.587, 0.114), np.float32)
    return max(
        (WatermarkFinding(_score(brightness, z), z) for z in ZOOMS), key=lambda each: each.score
    )


@cache
def pattern() -> Pattern:
    down, across = np.fft.fftfreq(TILE)[:, None], np.fft.rfftfreq(TILE)[None]
    distance = np.hypot(down, across)
    # A column of zeros and one of Nyquist's frequency would need pairs that agree.
    is_wave = (distance >= BAND[0]) & (distance <= BAND[1]) & (across > 0)
    drawn = hashlib.shake_256(NAME).digest(2 * is_wave.size)
    phases = np.frombuffer(drawn, "<u2").reshape(is_wave.shape) * (2 * np.pi / 65536)
    waves = np.where(is_wave, np.exp(1j * phases), 0)
    tile = np.fft.irfft2(waves, (TILE, TILE))
    rounded = np.rint(tile / tile.std() / STEP) * STEP
    return Pattern(rounded.astype(np.float32), waves, 2 * int(is_wave.sum()))


def _strengths(pixels: Pixels) -> NDArray[np.float32]:
    """One a block: fainter where the eye is keen, as strong in all as MOST allows."""
    contrast = _contrasts(pixels)
    more = np.minimum(GAIN * contrast, STRONGEST - FAINTEST)
    # The part of `more` at which the mean square of FAINTEST + part * more is MOST's.
    a, b, c = (more * more).mean(), FAINTEST * more.mean(), FAINTEST**2 - MOST**2
    part = 1.0 if a + 2 * b + c <= 0 else (math.sqrt(b * b - a * c) - b) / a
    return (FAINTEST + part * more).astype(np.float32)


def _contrasts(pixels: Pixels) -> Floats:
    """The standard deviation of brightness in each block, from whole numbers."""
    height, width, _ = pixels.shape
    missing = (-height % BLOCK, -width % BLOCK)
    wide = pixels.astype(np.uint16)
    brightness = (wide[..., 0] + 2 * wide[..., 1] + wide[..., 2]) >> 2
    if any(missing):
        brightness = np.pad(brightness, ((0, missing[0]), (0, missing[1])), mode="edge")
    down, across = (side // BLOCK for side in brightness.shape)
    blocks = brightness.astype(np.uint32).reshape(down, BLOCK, across, BLOCK)
    total, squares = blocks.sum((1, 3)), (blocks * blocks).sum((1, 3))
    size = BLOCK * BLOCK
    deviations: Floats = np.sqrt(np.float64(size) * squares - np.float64(total) ** 2) / size
    return deviations


def _score(brightness: Brightness, zoom: float) -> float:
    """The mark's waves in step, at the best shift, in standard deviations of waves at random."""
    zoomed = _zoomed(brightness, zoom)
    if min(zoomed.shape) < SMALLEST:
        return 0.0
    evened = _evened(zoomed.astype(np.float64))
    down, across = (-(-side // TILE) for side in evened.shape)
    missing = (down * TILE - evened.shape[0], across * TILE - evened.shape[1])
    tiles = np.pad(evened, ((0, missing[0]), (0, missing[1]))).reshape(down, TILE, across, TILE)
    _, waves, in_all = pattern()
    there = np.fft.rfft2(tiles.sum((0, 2))) * waves.conj()
    height = np.abs(there)
    in_step = np.divide(there, height, out=np.zeros_like(there), where=height > 1e-6)
    sums = np.fft.irfft2(in_step, (TILE, TILE)) * TILE * TILE
    return float(sums.max() / math.sqrt(in_all))


def _zoomed(brightness: Brightness, zoom: float) -> Brightness:
    """The middle, as large as it was before it was scaled."""
    window = math.ceil(WINDOW / zoom)
    top, left = (max(side - window, 0) // 2 for side in brightness.shape)
    middle = brightness[top : top + window, left : left + window]
    if zoom == 1:
        return middle
    height, width = middle.shape
    size = max(round(width * zoom), 1), max(round(height * zoom), 1)
    return np.asarray(Image.fromarray(middle).resize(size, Image.Resampling.BICUBIC))


def _evened(values: Floats) -> Floats:
    """Less the mean of its surroundings, in units of their contrast."""
    rest = values - _mean(values)
    evened: Floats = rest / (GRAIN + np.sqrt(np.maximum(_mean(rest * rest), 0)))
    return evened


def _mean(values: Floats) -> Floats:
    """Of the square around each pixel; at the edge, of the edge's pixels again."""
    side = 2 * REACH + 1
    padded = np.pad(values, ((REACH + 1, REACH), (REACH + 1, REACH)), mode="edge")
    sums = padded.cumsum(0).cumsum(1)
    means: Floats = sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side]
    means += sums[:-side, :-side]
    return means / (side * side)
