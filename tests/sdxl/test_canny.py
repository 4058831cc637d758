"""Our edges equal OpenCV's: the results of `cv2.Canny` of OpenCV 5.0.0 are below."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from sdxl.canny import Pixels, canny


def rings(height: int, width: int, channels: int) -> Pixels:
    """Return rings and steps, with the same numbers on every machine, in colour if `channels`."""
    y, x = np.mgrid[:height, :width]
    planes = [
        ((x - 20 - 9 * c) ** 2 + (y - 17 + 5 * c) ** 2) * (c + 2) // 37 % 160
        + (x // 11 + y // 7) % 4 * 24
        for c in range(channels or 1)
    ]
    return np.stack(planes, -1).astype(np.uint8) if channels else planes[0].astype(np.uint8)


EXPECTED = {
    (64, 80, 0, 100, 200): (926, "188d61530de5d573"),
    (64, 80, 3, 100, 200): (1063, "a399a70d4694a211"),
    (97, 61, 3, 50, 300): (1067, "b69ff65b212e2f3c"),
    (33, 120, 3, 0, 0): (1047, "0034ff8e86c2b129"),
    (1, 40, 0, 20, 60): (3, "40e66390819e8198"),
    (40, 1, 3, 20, 60): (6, "9dda44d4b5026872"),
}
"""the number of edge pixels and their digest, by height, width, channels and thresholds"""


def digest(edges: Pixels) -> str:
    return hashlib.sha256(np.packbits(edges > 0).tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("case", EXPECTED)
def test_edges_are_those_of_opencv(case: tuple[int, int, int, int, int]) -> None:
    height, width, channels, low, high = case
    edges = canny(rings(height, width, channels), low, high)
    assert edges.shape == (height, width)
    assert {*np.unique(edges).tolist()} <= {0, 255}
    assert (int((edges > 0).sum()), digest(edges)) == EXPECTED[case]


def test_thresholds_may_be_swapped() -> None:
    image = rings(40, 50, 3)
    assert np.array_equal(canny(image, 100, 200), canny(image, 200, 100))
