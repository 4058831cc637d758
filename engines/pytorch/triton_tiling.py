"""Which tile of a product a program works on, and what a tile asks of the compiler."""

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


def settings_of(tile: Tile, x: Tensor) -> dict[str, Any]:
    return {
        "IS_WHOLE": x.dtype == torch.int8,
        "M": tile.m,
        "N": tile.n,
        "K": tile.k,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
