"""PSNR of two images with values from 0 to 255."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def psnr_db(one: NDArray[Any], other: NDArray[Any]) -> float:
    """Infinite for equal images."""
    error = float(np.mean((one.astype(np.float64) - other) ** 2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)
