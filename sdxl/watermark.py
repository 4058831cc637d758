"""An invisible mark in the pixels of generated pictures. It is found also in compressed, scaled and
cropped copies.

The mark is a pattern of 64 by 64 pixels that repeats over the whole picture's brightness. It has
waves of equal height in a band of middle frequencies, with phases from a hash, and looks like faint
noise. To find it, even out the picture's contrast, add up all tiles, keep only the phase of each
wave in the band, and compare these phases with the pattern's at every shift. Without the mark the
differences are random, so a score tells the probability of chance. The pattern is public: with this
file anyone can find the mark, add it to other pictures, and remove it.
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
"""the name whose hash gives the phases; another name is another mark"""
BAND = (0.09, 0.22)
"""cycles a pixel: coarse enough to survive JPEG and half the size, too fine to show as spots"""
FAINTEST, STRONGEST = 1.25, 5.0
"""strength (root mean square, of 255) in plain areas, and in the roughest ones, which hide it"""
GAIN = 0.15
"""strength for each unit of a block's contrast"""
MOST = 2.4
"""strength over the whole picture: 40.5 dB"""
STEP = 1 / 64
"""the pattern is rounded to multiples of this, since Fourier transforms differ between machines"""

ZOOMS = (1.0, 2.0, 4 / 3, 3 / 2, 2 / 3, 1 / 2)
"""factors by which a scaled picture is scaled back"""
WINDOW = 1024
"""side in pixels of the searched middle of the picture; a larger one finds no more"""
SMALLEST = 32
"""side in pixels below which no mark is found"""
REACH = 4
"""a pixel's surroundings reach this many pixels to each side"""
GRAIN = 1.0
"""contrast (of 255) that rounding causes in a plain area"""
FOUND = 6.5
"""by chance, one of a million unmarked pictures has this score"""


class Pattern(NamedTuple):
    tile: NDArray[np.float32]
    """mean 0, root mean square 1"""
    waves: NDArray[np.complex128]
    """the tile's Fourier transform, of height 1 in the band, 0 elsewhere"""
    wave_count: int
    """number of waves"""


@dataclass(frozen=True)
class WatermarkFinding:
    score: float
    """standard deviations of the scores of unmarked pictures"""

    @property
    def is_found(self) -> bool:
        return self.score >= FOUND

    @property
    def chance(self) -> float:
        """The probability that an unmarked picture has this score at any shift and zoom."""
        tries = TILE * TILE * len(ZOOMS)
        return min(1.0, tries * math.erfc(max(self.score, 0.0) / math.sqrt(2)) / 2)


def mark(pixels: Pixels) -> Pixels:
    """Return the picture with the mark, always the same, at a PSNR of about 40 dB or more."""
    height, width, _ = pixels.shape
    across, down = -(-width // TILE), -(-height // TILE)
    tile = np.tile(pattern().tile, (down, across))[:height, :width]
    strength = _strengths(pixels).repeat(BLOCK, 0).repeat(BLOCK, 1)[:height, :width]
    change = np.rint(tile * strength).astype(np.int16)
    return np.clip(pixels + change[..., None], 0, 255).astype(np.uint8)


def find(pixels: Pixels) -> WatermarkFinding:
    """Return the best score over all zooms."""
    brightness = pixels.astype(np.float32) @ np.array((0.299, 0.587, 0.114), np.float32)
    return WatermarkFinding(max(_score(brightness, zoom) for zoom in ZOOMS))


@cache
def pattern() -> Pattern:
    down, across = np.fft.fftfreq(TILE)[:, None], np.fft.rfftfreq(TILE)[None]
    distance = np.hypot(down, across)
    # The first and last columns of a real transform have pairs of equal waves; they are unused.
    is_wave = (distance >= BAND[0]) & (distance <= BAND[1]) & (across > 0)
    drawn = hashlib.shake_256(NAME).digest(2 * is_wave.size)
    phases = np.frombuffer(drawn, "<u2").reshape(is_wave.shape) * (2 * np.pi / 65536)
    waves = np.where(is_wave, np.exp(1j * phases), 0)
    tile = np.fft.irfft2(waves, (TILE, TILE))
    rounded = np.rint(tile / tile.std() / STEP) * STEP
    return Pattern(rounded.astype(np.float32), waves, 2 * int(is_wave.sum()))


def _strengths(pixels: Pixels) -> NDArray[np.float32]:
    """Return the strength in each block: faint in plain areas, and in total at most MOST."""
    contrast = _contrasts(pixels)
    more = np.minimum(GAIN * contrast, STRONGEST - FAINTEST)
    # Choose `part` so that the root mean square of FAINTEST + part * more is at most MOST.
    a, b, c = (more * more).mean(), FAINTEST * more.mean(), FAINTEST**2 - MOST**2
    part = 1.0 if a + 2 * b + c <= 0 else (math.sqrt(b * b - a * c) - b) / a
    return (FAINTEST + part * more).astype(np.float32)


def _contrasts(pixels: Pixels) -> Floats:
    """Return the standard deviation of brightness in each block, computed from whole numbers."""
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
    return np.sqrt(np.float64(size) * squares - np.float64(total) ** 2) / size


def _score(brightness: Brightness, zoom: float) -> float:
    """Return the match of phases at the best shift, in standard deviations of random phases."""
    zoomed = _zoomed(brightness, zoom)
    if min(zoomed.shape) < SMALLEST:
        return 0.0
    evened = _evened(zoomed.astype(np.float64))
    down, across = (-(-side // TILE) for side in evened.shape)
    missing = (down * TILE - evened.shape[0], across * TILE - evened.shape[1])
    tiles = np.pad(evened, ((0, missing[0]), (0, missing[1]))).reshape(down, TILE, across, TILE)
    _, waves, count = pattern()
    product = np.fft.rfft2(tiles.sum((0, 2))) * waves.conj()
    height = np.abs(product)
    phases = np.divide(product, height, out=np.zeros_like(product), where=height > 1e-6)
    sums = np.fft.irfft2(phases, (TILE, TILE)) * TILE * TILE
    return float(sums.max() / math.sqrt(count))


def _zoomed(brightness: Brightness, zoom: float) -> Brightness:
    """Return the middle of the picture, scaled by `zoom`."""
    window = math.ceil(WINDOW / zoom)
    top, left = (max(side - window, 0) // 2 for side in brightness.shape)
    middle = brightness[top : top + window, left : left + window]
    if zoom == 1:
        return middle
    height, width = middle.shape
    size = max(round(width * zoom), 1), max(round(height * zoom), 1)
    return np.asarray(Image.fromarray(middle).resize(size, Image.Resampling.BICUBIC))


def _evened(values: Floats) -> Floats:
    """Subtract the mean of each pixel's surroundings and divide by their contrast."""
    rest = values - _mean(values)
    return rest / (GRAIN + np.sqrt(np.maximum(_mean(rest * rest), 0)))


def _mean(values: Floats) -> Floats:
    """Return the mean of the square around each pixel; the picture's edge is repeated."""
    side = 2 * REACH + 1
    padded = np.pad(values, ((REACH + 1, REACH), (REACH + 1, REACH)), mode="edge")
    sums = padded.cumsum(0).cumsum(1)
    means: Floats = sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side]
    means += sums[:-side, :-side]
    return means / (side * side)
