"""Which tile of a product a program works on, where its taps read, and what a tile asks of the
compiler.

A convolution of a doubled map is four of 2×2 taps on what was not doubled, one for each pixel of
the four that a pixel becomes: its quarter.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.pytorch.tiles import Tile

_GROUP = tl.constexpr(8)
"""rows of tiles that are worked off together, so that they share weights in the cache"""


@triton.jit
def own_tile(count, lines, M: tl.constexpr, N: tl.constexpr):
    """The first row and the first line of this program's tile, of `count` rows by `lines`."""
    across = tl.cdiv(lines, N)
    in_group = _GROUP * across
    first = (tl.program_id(0) // in_group) * _GROUP
    tall = tl.minimum(tl.cdiv(count, M) - first, _GROUP)
    down = first + (tl.program_id(0) % in_group) % tall
    return down * M, ((tl.program_id(0) % in_group) // tall) * N


@triton.jit
def tap_by(tap, quarter, TAPS: tl.constexpr):
    """How far down and right of its pixel a tap reads."""
    if TAPS == 9:
        down, right = tap // 3 - 1, tap % 3 - 1
    elif TAPS == 4:
        down, right = tap // 2 - 1 + quarter // 2, tap % 2 - 1 + quarter % 2
    else:
        down, right = 0, 0
    return down, right


@triton.jit
def result_of(line, left, width, quarter, TAPS: tl.constexpr):
    """The result's pixel, by the line, of all pictures, and the place in it."""
    if TAPS == 4:
        pixel = 2 * ((2 * line + quarter // 2) * width + left) + quarter % 2
    else:
        pixel = line * width + left
    return pixel


def taps_of(weight: Tensor) -> int:
    """[out, in], [out, 3, 3, in], or of four quarters [4, out, 2, 2, in]."""
    return {2: 1, 4: 9, 5: 4}[weight.dim()]


def out_channels_of(weight: Tensor) -> int:
    return weight.shape[0] if weight.dim() == 2 else weight.shape[-4]


def quarters_of(weight: Tensor) -> int:
    return 4 if weight.dim() == 5 else 1


def settings_of(tile: Tile, x: Tensor) -> dict[str, Any]:
    return {
        "IS_WHOLE": x.dtype == torch.int8,
        "M": tile.m,
        "N": tile.n,
        "K": tile.k,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
