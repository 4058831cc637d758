"""Functions that several Triton kernels share: tiles of a product, offsets of its taps, scaling of
its sums, and rounding to 8 bits.

A convolution of a doubled map is four convolutions of 2×2 taps on the undoubled map: one quarter
for each of the four pixels that a pixel becomes. Rounding clamps numbers that are too large, and
preserves NaN: FP8 has a NaN, and for int8 the row's flag becomes NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.pytorch.tiles import Tile

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
SIZES = (
    "count",
    "height",
    "width",
    "pixels",
    "places",
    "tokens",
    "keys",
    "splits",
    "page_count",
    "lora_tokens",
)
"""parameters that depend on the picture's size or on the rows of a call. Kernels do not specialise
them, so one compiled form serves all sizes. Numbers of channels are specialised: their divisibility
vectorises addresses."""
_GROUP = tl.constexpr(8)
"""rows of tiles that are computed together, because they share weights in the cache"""
HALF_STEP = tl.constexpr(12582912.0)
"""1.5 × 2^23: adding and subtracting this rounds a float32 to the nearest whole number, halves to
even"""


def jit(function: Any) -> Any:
    """Make a Triton function and compute its key at once. Triton omits the constants of callees
    without a key, so keys computed later would differ between processes."""
    kernel = triton.jit(function, do_not_specialize=SIZES)
    if not IS_INTERPRETED:
        _ = kernel.cache_key
    return kernel


@jit
def tile_start(count, lines, M: tl.constexpr, N: tl.constexpr):
    """Return the first row and the first line of this program's tile, of `count` rows by
    `lines`."""
    across = tl.cdiv(lines, N)
    in_group = _GROUP * across
    first = (tl.program_id(0) // in_group) * _GROUP
    tall = tl.minimum(tl.cdiv(count, M) - first, _GROUP)
    down = first + (tl.program_id(0) % in_group) % tall
    return down * M, ((tl.program_id(0) % in_group) // tall) * N


@jit
def row_sides(sides, row, height, width):
    """Return the height and width of a row's map, in slots from the table."""
    if sides is not None:
        height, width = tl.load(sides + 2 * row), tl.load(sides + 2 * row + 1)
    return height, width


@jit
def tap_offset(tap, quarter, TAPS: tl.constexpr):
    """Return how far below and to the right of its pixel a tap reads."""
    if TAPS == 9:
        down, right = tap // 3 - 1, tap % 3 - 1
    elif TAPS == 4:
        down, right = tap // 2 - 1 + quarter // 2, tap % 2 - 1 + quarter % 2
    else:
        down, right = 0, 0
    return down, right


@jit
def result_pixel(line, left, width, quarter, TAPS: tl.constexpr):
    """Return the result's pixel. `line` counts the lines of all pictures; `left` is the place in
    the line."""
    if TAPS == 4:
        pixel = 2 * ((2 * line + quarter // 2) * width + left) + quarter % 2
    else:
        pixel = line * width + left
    return pixel


@jit
def scaled(total, scale, bias, channel, is_channel):
    """Scale a product's sums [rows, channels] and add the bias."""
    value = total.to(tl.float32) * tl.load(scale + channel, mask=is_channel, other=0.0)[None, :]
    return value + tl.load(bias + channel, mask=is_channel, other=0.0)[None, :]


@jit
def limited(value, largest):
    value = tl.maximum(value, -largest, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, largest, propagate_nan=tl.PropagateNan.ALL)


@jit
def store_steps(out, value, mask, largest):
    """Store the nearest 8-bit numbers. The caller has checked int8 values for NaN."""
    dtype: tl.constexpr = out.dtype.element_ty
    value = limited(value, largest)
    if dtype == tl.int8:
        # The lowest bits of the sum are the nearest whole number.
        tl.store(out, (value + HALF_STEP).to(tl.int32, bitcast=True).to(tl.int8), mask=mask)
    else:
        tl.store(out, value.to(dtype), mask=mask)


@jit
def store_rounded(out, flag, value, mask, largest):
    """Store rounded values. The row's `flag` becomes NaN if a value for int8 is NaN."""
    dtype: tl.constexpr = out.dtype.element_ty
    if dtype == tl.int8:
        broken = mask & (value != value)
        tl.store(flag + tl.zeros_like(value).to(tl.int32), value, mask=broken)
        value = tl.where(broken, 0.0, value)
    value = limited(value, largest)
    if dtype == tl.int8:
        value = (value + HALF_STEP) - HALF_STEP
    tl.store(out, value.to(dtype), mask=mask)


@jit
def store_rounded_lines(out, flags, value, mask, largest):
    """Store a tile with a flag for each line. It takes fewer operations a value: the sum of a line
    with a NaN is NaN. Masked values must be numbers."""
    if out.dtype.element_ty == tl.int8:
        total = tl.sum(limited(value, largest), 1)
        tl.store(flags, total, mask=(total != total) & (tl.max(mask.to(tl.int32), 1) > 0))
    store_steps(out, value, mask, largest)


def taps_of(weight: Tensor) -> int:
    """Return the taps of a weight [out, in], [out, 3, 3, in], or of four quarters
    [4, out, 2, 2, in]."""
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
