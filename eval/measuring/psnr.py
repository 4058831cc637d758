"""How near two pictures of bytes are, without a bound: equal ones are infinitely near."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def psnr_db(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    error = float(np.mean((one.astype(np.float64) - other) ** 2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)
