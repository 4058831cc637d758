"""The 8-bit products for GPUs with a tensor memory accelerator, Hopper and later. Descriptors read
both factors, so the loop computes no masks or addresses, and loads the next tiles while it
multiplies.

A 3×3 convolution reads a bordered map: a column of zeros behind each line, and a line of zeros
behind each picture. Each tap then reads the same rows of memory at another offset. The
feed-forward's first product includes its GEGLU and the rounding for the second product. It knows no
modules; with TRITON_INTERPRET=1, set before the import, it runs on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engines.pytorch.launches import LARGEST, capability_of, launch
from engines.pytorch.slots import bordered, bordered_slot_of, sides_of
from engines.pytorch.tiles import Tile
from engines.pytorch.triton_low_rank import (
    TokenRanks,
    arguments_of,
    lora_sums,
    rows_of_tile,
    transposed_lora_sums,
)
from engines.pytorch.triton_shared import (
    IS_INTERPRETED,
    jit,
    limited,
    out_channels_of,
    quarters_of,
    result_pixel,
    row_sides,
    scaled,
    settings_of,
    store_rounded_lines,
    tap_offset,
    taps_of,
    tile_start,
)

ALIGNED = 16
"""Lines of a descriptor's tensor are multiples of this number of bytes."""
LARGEST_E4M3 = tl.constexpr(LARGEST[torch.float8_e4m3fn])
MOST_AT_ONCE = tl.constexpr(128 * 128)
"""sums of a tile that are stored at the same time"""
SHARE = tl.constexpr((-1.0097, -1.0771, -0.5502, -0.01275))
"""coefficients of log2(share(-a)), where share is the normal distribution function. The share is
within 0.7% from 0 to 5; beyond, a × share is at most 1e-6. E4M3 rounds to 6%."""


@jit
def _store_sums(
    total,
    right,
    residual,
    product,
    TAPS: tl.constexpr,
    HAS_SIDES: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
):
    scale, bias, out, down, quarter, count, out_channels, geometry = product
    row, height, width, places, pixels = geometry
    M: tl.constexpr = total.shape[0]
    N: tl.constexpr = total.shape[1]
    target = right + tl.arange(0, N)
    is_channel = target < out_channels
    scale += quarter * out_channels
    if IS_TRANSPOSED:
        # The result's lines are the layer's channels.
        line = down + tl.arange(0, M)
        value = total.to(tl.float32) * tl.load(scale + line, mask=line < count, other=0.0)[:, None]
        value += tl.load(bias + line, mask=line < count, other=0.0)[:, None]
    else:
        value = scaled(total, scale, bias, target, is_channel)
    pixel = down + tl.arange(0, M)
    inside = pixel < count
    if HAS_SIDES:
        place = pixel - row * places
        left, top = place % (width + 1), place // (width + 1)
        is_picture = (left < width) & (top < height)
        # The places behind the picture write the zeros of the result's pads.
        behind = place - height * (width + 1)
        pad = height * width + behind
        if TAPS == 4:
            pad = 4 * pad + quarter
        pixel = tl.where(behind < 0, result_pixel(top, left, width, quarter, TAPS), pad)
        inside = is_picture | ((behind >= 0) & (pad < pixels))
        value = tl.where(is_picture[:, None], value, 0.0)
        pixel += row * pixels
    elif TAPS > 1:
        # Convert a place in the bordered map to a place in the plain map.
        left, line = pixel % (width + 1), pixel // (width + 1)
        top = line % (height + 1)
        inside = inside & (left < width) & (top < height)
        pixel = result_pixel(line // (height + 1) * height + top, left, width, quarter, TAPS)
    if IS_TRANSPOSED:
        batch, rows = tl.program_id(1).to(tl.int64), tl.num_programs(1)
        place = ((pixel.to(tl.int64) * rows + batch) * out_channels)[:, None] + target[None, :]
    else:
        place = pixel.to(tl.int64)[:, None] * out_channels + target[None, :]
    mask = inside[:, None] & is_channel[None, :]
    if residual is not None:
        value += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    if out.dtype.element_ty == tl.float8e4nv:
        value = limited(value, LARGEST_E4M3)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


@jit
def _tma_product(
    scale,
    bias,
    x,
    weight,
    residual,
    sides,
    ranks,
    up,
    pages,
    page_count,
    lora_tokens,
    out,
    count,
    height,
    width,
    places,
    pixels,
    channels,
    out_channels,
    TAPS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    down, right = tile_start(count, out_channels, M, N)
    quarter = tl.program_id(1) if TAPS == 4 else 0
    line = quarter * out_channels + right
    if IS_TRANSPOSED:
        # A tile has tokens of one row. Its results are `out_channels` long, including padding.
        line = tl.program_id(1) * width + right
    blocks = tl.cdiv(channels, K)
    row = down // places
    height, width = row_sides(sides, row, height, width)
    total = tl.zeros([M, N], tl.int32 if IS_WHOLE else tl.float32)
    if ranks is not None:
        low_rank = (ranks, up, pages, page_count, lora_tokens)
        first, second = down + tl.arange(0, M), right + tl.arange(0, N)
        if IS_TRANSPOSED:
            batch = tl.program_id(1)
            total = transposed_lora_sums(low_rank, scale, first, second, batch, count, IS_WHOLE)
        else:
            rows = rows_of_tile(down, M, count, lora_tokens)
            total = lora_sums(low_rank, scale, first, second, rows, count, out_channels, IS_WHOLE)
    steps = TAPS * blocks
    HAS_SIDES: tl.constexpr = sides is not None
    if HAS_SIDES:
        # A tile outside its picture is skipped.
        steps = tl.where(down - row * places < height * (width + 1), steps, 0)
    for k in range(steps):
        tap, channel = k // blocks, (k % blocks) * K
        down_by, right_by = tap_offset(tap, quarter, TAPS)
        a = x.load([down + down_by * (width + 1) + right_by, channel])
        b = weight.load([line, tap * channels + channel])
        total = tl.dot(a, b.T, total, out_dtype=tl.int32 if IS_WHOLE else tl.float32)
    geometry = (row, height, width, places, pixels)
    product = (scale, bias, out, down, quarter, count, out_channels, geometry)
    if M * N > MOST_AT_ONCE:
        # Storing all at once would spill on Blackwell, whose sums are in tensor memory.
        first, second = total.reshape(M, 2, N // 2).permute(0, 2, 1).split()
        _store_sums(first, right, residual, product, TAPS, HAS_SIDES, IS_TRANSPOSED)
        _store_sums(second, right + N // 2, residual, product, TAPS, HAS_SIDES, IS_TRANSPOSED)
    else:
        _store_sums(total, right, residual, product, TAPS, HAS_SIDES, IS_TRANSPOSED)


@jit
def gelu(x):
    """Return x × share(x), computed as max(x, 0) - |x| × share(-|x|), which is as exact for small
    results as for large ones. An infinity becomes NaN."""
    size = tl.abs(x)
    share = tl.exp2(((SHARE[3] * size + SHARE[2]) * size + SHARE[1]) * size + SHARE[0])
    return tl.maximum(x, 0.0) - size * share


@jit
def _gated_product(
    scale,
    bias,
    x,
    weight,
    flags,
    lora_scale,
    ranks,
    up,
    pages,
    page_count,
    lora_tokens,
    out,
    tokens,
    count,
    channels,
    out_channels,
    largest,
    IS_WHOLE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    HALF: tl.constexpr = N // 2
    down, right = tile_start(count, out_channels, M, HALF)
    total = tl.zeros([M, N], tl.int32 if IS_WHOLE else tl.float32)
    if ranks is not None:
        low_rank = (ranks, up, pages, page_count, lora_tokens)
        place, rows = down + tl.arange(0, M), rows_of_tile(down, M, count, lora_tokens)
        # Values, then their gates. Results beyond the last channel are not stored.
        each = tl.arange(0, N)
        line = (each // HALF) * out_channels + right + each % HALF
        lines = 2 * out_channels
        total = lora_sums(low_rank, lora_scale, place, line, rows, count, lines, IS_WHOLE)
    for channel in range(0, channels, K):
        a = x.load([down, channel])
        b = weight.load([0, right, channel]).reshape(N, K)
        total = tl.dot(a, b.T, total, out_dtype=tl.int32 if IS_WHOLE else tl.float32)
    value, gate = total.to(tl.float32).reshape(M, 2, HALF).permute(0, 2, 1).split()
    target = right + tl.arange(0, HALF)
    is_channel = target < out_channels
    value = scaled(value, scale, bias, target, is_channel)
    gate = scaled(gate, scale + out_channels, bias + out_channels, target, is_channel)
    token = down + tl.arange(0, M)
    place = token.to(tl.int64)[:, None] * out_channels + target[None, :]
    mask = (token < count)[:, None] & is_channel[None, :]
    store_rounded_lines(out + place, flags + token // tokens, value * gelu(gate), mask, largest)


def has_tma(device: torch.device) -> bool:
    """Return whether the device has a TMA. The interpreter counts as having one."""
    return IS_INTERPRETED or capability_of(device) >= (9, 0)


def fits_tma(weight: Tensor) -> bool:
    return has_tma(weight.device) and weight.shape[-1] % ALIGNED == 0


def takes_tma(x: Tensor, weight: Tensor) -> bool:
    """Return whether descriptors read the factors of this product."""
    return fits_tma(weight) and (weight.dim() == 2 or is_bordered(x))


def empty_bordered(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty map like x, channels last, in memory with a border."""
    rows, channels, height, width = x.shape
    if sides_of(x) is not None:
        place = x.new_empty((rows, 1, bordered_places(x), channels), dtype=dtype)
        return place.permute(0, 3, 1, 2)
    place = x.new_empty((rows, height + 1, width + 1, channels), dtype=dtype)
    return place[:, :height, :width].permute(0, 3, 1, 2)


def bordered_places(x: Tensor) -> int:
    """Return the pixels of one row of a bordered map."""
    height, width = x.shape[2:]
    return (height + 1) * (width + 1) if sides_of(x) is None else bordered(width)


def is_bordered(x: Tensor) -> bool:
    if x.dim() != 4 or bordered_slot_of(x) is not None:
        return x.dim() == 4
    channels, height, width = x.shape[1:]
    line = (width + 1) * channels
    return x.stride() == ((height + 1) * line, 1, line, channels)


def run_tma_product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    out: Tensor,
    tile: Tile,
    *,
    is_transposed: bool = False,
    low_rank: TokenRanks | None = None,
) -> None:
    """Multiply x by a weight. With `is_transposed`, x is the weight and `weight` the tokens
    [rows × tokens, channels]; the lines of `out` [out, rows, tokens] are padded to multiples of 16
    bytes."""
    out_channels, channels = out_channels_of(weight), weight.shape[-1]
    taps, quarters = taps_of(weight), quarters_of(weight)
    height, width = x.shape[-2:] if x.dim() == 4 else (1, 1)
    count, lines = x.numel() // channels, quarters * out_channels
    sides = sides_of(x) if taps > 1 else None
    places = pixels = 1
    if sides is not None:
        places, pixels = width, out.shape[3]
    elif taps > 1:
        count = x.shape[0] * (height + 1) * (width + 1)
    if is_transposed:
        quarters, width = out.shape[1:]
        out_channels = out.stride(1)
    first = TensorDescriptor(x, [count, channels], [channels, 1], [tile.m, tile.k])
    second = TensorDescriptor(
        weight, [lines, taps * channels], [taps * channels, 1], [tile.n, tile.k]
    )
    tensors = (scale, bias, first, second, residual, sides, *arguments_of(low_rank), out)
    sizes = (count, height, width, places, pixels, channels, out_channels)
    launch(
        _tma_product,
        (triton.cdiv(count, tile.m) * triton.cdiv(out_channels, tile.n), quarters),
        *tensors,
        *sizes,
        TAPS=taps,
        IS_TRANSPOSED=is_transposed,
        **settings_of(tile, x),
    )


def run_gated_product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    flags: Tensor,
    out: Tensor,
    low_rank: TokenRanks | None,
    lora_scale: Tensor | None,
    tile: Tile,
) -> None:
    """Multiply tokens [rows, tokens, channels]. The second half of the weight computes gates."""
    out_channels, channels = weight.shape[0] // 2, weight.shape[-1]
    count, half = x.numel() // channels, tile.n // 2
    first = TensorDescriptor(x, [count, channels], [channels, 1], [tile.m, tile.k])
    dims, strides = [2, out_channels, channels], [out_channels * channels, channels, 1]
    second = TensorDescriptor(weight, dims, strides, [2, half, tile.k])
    tensors = (scale, bias, first, second, flags, lora_scale, *arguments_of(low_rank), out)
    sizes = (x.shape[1], count, channels, out_channels, LARGEST[out.dtype])
    launch(
        _gated_product,
        (triton.cdiv(count, tile.m) * triton.cdiv(out_channels, half),),
        *tensors,
        *sizes,
        **settings_of(tile, x),
    )
