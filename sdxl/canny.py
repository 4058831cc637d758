"""Canny edges of an image, for ControlNets of edges. The result equals OpenCV's `Canny` with
defaults. It knows no networks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Pixels = NDArray[np.uint8]
TAN_22 = 13573
"""the tangent of 22.5° in fixed point with 15 bits, as in OpenCV's canny.cpp (`TG22`)"""
BITS = 15
EIGHT_NEIGHBOURS = np.ones((3, 3), bool)


def canny(image: Pixels, low: int, high: int) -> Pixels:
    """Return [height, width] with 255 at edges and 0 elsewhere, for [height, width] or [height,
    width, channels]. An edge has a gradient above `low` everywhere and above `high` somewhere."""
    low, high = min(low, high), max(low, high)
    across, down = _gradients(image.astype(np.int32))
    strength = np.abs(across) + np.abs(down)
    is_edge = (strength > low) & _is_ridge(strength, across, down)
    labels, count = ndimage.label(is_edge, EIGHT_NEIGHBOURS)
    is_kept = np.zeros(count + 1, bool)
    is_kept[labels[is_edge & (strength > high)]] = True
    return np.where(is_kept[labels], 255, 0).astype(np.uint8)


def _gradients(image: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the Sobel derivatives across and down, from each pixel's steepest channel."""
    planes = image if image.ndim == 3 else image[:, :, None]
    padded = np.pad(planes, ((1, 1), (1, 1), (0, 0)), "edge")
    rows = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    columns = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    across, down = rows[:, 2:] - rows[:, :-2], columns[2:] - columns[:-2]
    steepest = (np.abs(across) + np.abs(down)).argmax(2)[:, :, None]
    across, down = (np.take_along_axis(each, steepest, 2)[:, :, 0] for each in (across, down))
    return across, down


def _is_ridge(strength: NDArray[Any], across: NDArray[Any], down: NDArray[Any]) -> NDArray[Any]:
    """Return where a pixel is the strongest along its gradient, rounded to four directions. Of
    equal neighbours across or down, the first is the strongest."""
    height, width = strength.shape
    padded = np.pad(strength, 1)

    def neighbour(y: int, x: int) -> NDArray[Any]:
        return padded[1 + y : 1 + y + height, 1 + x : 1 + x + width]

    scaled = np.abs(across) * TAN_22
    level = np.abs(down) << BITS
    is_across = level < scaled
    is_down = level > scaled + (np.abs(across) << (BITS + 1))
    falls = (across < 0) != (down < 0)
    # On the diagonals both neighbours must be weaker.
    diagonal = np.where(
        falls,
        (strength > neighbour(-1, 1)) & (strength > neighbour(1, -1)),
        (strength > neighbour(-1, -1)) & (strength > neighbour(1, 1)),
    )
    horizontal = (strength > neighbour(0, -1)) & (strength >= neighbour(0, 1))
    vertical = (strength > neighbour(-1, 0)) & (strength >= neighbour(1, 0))
    return np.where(is_across, horizontal, np.where(is_down, vertical, diagonal))
