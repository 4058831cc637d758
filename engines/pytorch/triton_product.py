"""The 8-bit product of linear layers and 3×3 convolutions, in Triton: an implicit matrix product
that ends with scaling and adding the bias and the residual.

It knows no modules; launches.py decides when it runs, and tiles.py chooses its tile. With
TRITON_INTERPRET=1, set before the import, it runs on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from engines.pytorch.launches import launch
from engines.pytorch.slots import bordered_slot_of
from engines.pytorch.tiles import Tile, TileProblem, Tiles, tiles_of
from engines.pytorch.triton_low_rank import TokenRanks, arguments_of, lora_sums, rows_of_tile
from engines.pytorch.triton_shared import (
    IS_INTERPRETED,
    jit,
    out_channels_of,
    quarters_of,
    result_pixel,
    scaled,
    settings_of,
    tap_offset,
    taps_of,
    tile_start,
)
from engines.pytorch.triton_tma_product import (
    ALIGNED,
    _gated_product,
    _tma_product,
    fits_tma,
    run_gated_product,
    run_tma_product,
    takes_tma,
)

__all__ = ["fits_tma", "gated_product", "product", "tiles", "transposed_product"]

SMALL = Tile(32, 32, 32, 4, 1)
"""the interpreter's tile"""


@jit
def _product(
    x,
    weight,
    scale,
    bias,
    residual,
    ranks,
    up,
    pages,
    page_count,
    lora_tokens,
    out,
    count,
    height,
    width,
    channels,
    out_channels,
    TAPS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    down, right = tile_start(count, out_channels, M, N)
    quarter = tl.program_id(1) if TAPS == 4 else 0
    pixel, target = down + tl.arange(0, M), right + tl.arange(0, N)
    left, top = pixel % width, (pixel // width) % height
    blocks = tl.cdiv(channels, K)
    total = tl.zeros([M, N], tl.int32 if IS_WHOLE else tl.float32)
    if ranks is not None:
        low_rank = (ranks, up, pages, page_count, lora_tokens)
        rows = rows_of_tile(down, M, count, lora_tokens)
        total = lora_sums(low_rank, scale, pixel, target, rows, count, out_channels, IS_WHOLE)
    for k in range(TAPS * blocks):
        tap, channel = k // blocks, (k % blocks) * K + tl.arange(0, K)
        down_by, right_by = tap_offset(tap, quarter, TAPS)
        inside = (left + right_by >= 0) & (left + right_by < width) & (pixel < count)
        inside = inside & (top + down_by >= 0) & (top + down_by < height)
        source = (pixel + down_by * width + right_by).to(tl.int64)[:, None] * channels
        input_mask = inside[:, None] & (channel < channels)[None, :]
        a = tl.load(x + source + channel[None, :], mask=input_mask, other=0.0)
        line = quarter * out_channels + target
        place = (line[None, :] * TAPS + tap) * channels + channel[:, None]
        weight_mask = (target < out_channels)[None, :] & (channel < channels)[:, None]
        b = tl.load(weight + place, mask=weight_mask, other=0.0)
        # Triton 3.6 would assume float32 and refuse a total of whole numbers.
        total = tl.dot(a, b, total, out_dtype=tl.int32 if IS_WHOLE else tl.float32)
    is_channel = target < out_channels
    value = scaled(total, scale + quarter * out_channels, bias, target, is_channel)
    mask = (pixel < count)[:, None] & is_channel[None, :]
    if TAPS == 4:
        pixel = result_pixel(pixel // width, left, width, quarter, TAPS)
    place = pixel.to(tl.int64)[:, None] * out_channels + target[None, :]
    if residual is not None:
        value += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


def product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    low_rank: TokenRanks | None = None,
) -> Tensor:
    """Multiply 8-bit tokens [..., channels] by a weight [out, channels], or convolve a
    channels-last map [rows, channels, h, w] with a weight [out, 3, 3, channels], or a map as if it
    were doubled with [4, out, 2, 2, channels]. Descriptors read bordered maps. Only products of
    tokens support LoRAs."""
    out = _empty_product(x, weight, dtype)
    start = run_tma_product if takes_tma(x, weight) else _run_product
    run = partial(start, x, weight, scale, bias, residual, out, low_rank=low_rank)
    run(_tile(x, weight, residual is not None, run))
    return out


def transposed_product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    dtype: torch.dtype,
    low_rank: TokenRanks | None = None,
) -> Tensor:
    """Multiply tokens [rows, tokens, channels] by a linear layer's weight; return
    [out, rows, tokens], with rows padded to multiples of 16 bytes. Descriptors read both
    factors."""
    rows, tokens = x.shape[:-1]
    dims = weight.shape[0], rows, triton.cdiv(tokens, ALIGNED) * ALIGNED
    out = torch.empty(dims, dtype=dtype, device=x.device)[:, :, :tokens]
    # Weight and tokens swap places.
    arguments = (weight, x.flatten(0, 1), scale, bias, None, out)
    run = partial(run_tma_product, *arguments, is_transposed=True, low_rank=low_rank)
    run(_tile(x, weight, False, run, is_transposed=True))
    return out


def gated_product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    flags: Tensor,
    number: torch.dtype,
    low_rank: TokenRanks | None = None,
    lora_scale: Tensor | None = None,
) -> Tensor:
    """Multiply tokens by a linear layer's weight; return the first half of the channels times the
    GELU of the second half, rounded to `number`. The first half's scale and bias contain the steps.
    `lora_scale` does not, and LoRAs add in its units. Descriptors read both factors."""
    channels = weight.shape[0] // 2
    out = torch.empty((*x.shape[:-1], channels), dtype=number, device=x.device)
    run = partial(run_gated_product, x, weight, scale, bias, flags, out, low_rank, lora_scale)
    run(_tile(x, weight, False, run, is_gated=True))
    return out


def _empty_product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    out_channels, times = out_channels_of(weight), 2 if quarters_of(weight) == 4 else 1
    if (slot := bordered_slot_of(x)) is not None:
        place = x.new_empty((x.shape[0], 1, times**2 * slot, out_channels), dtype=dtype)
        return place.permute(0, 3, 1, 2)
    if x.dim() != 4:
        return torch.empty((*x.shape[:-1], out_channels), dtype=dtype, device=x.device)
    dims = (x.shape[0], out_channels, *(times * side for side in x.shape[2:]))
    layout = torch.channels_last
    return torch.empty(dims, dtype=dtype, device=x.device, memory_format=layout)


def _tile(
    x: Tensor,
    weight: Tensor,
    has_residual: bool,
    run: Callable[[Tile], None],
    *,
    is_gated: bool = False,
    is_transposed: bool = False,
) -> Tile:
    if IS_INTERPRETED:
        return SMALL
    problem = TileProblem(
        str(x.dtype).removeprefix("torch."),
        taps_of(weight),
        weight.shape[-1],
        out_channels_of(weight),
        x.numel() // weight.shape[-1],
        has_residual,
        is_gated,
        is_transposed,
        0 if bordered_slot_of(x) is None else x.shape[3],
    )
    return tiles(x.device).choose(problem, run, _seconds)


@cache
def tiles(device: torch.device) -> Tiles:
    """Return the tiles for this GPU, Triton and version of the kernels."""
    kernels = (_product, _tma_product, _gated_product)
    keys = " ".join(kernel.cache_key for kernel in kernels)
    return tiles_of(device, f"{triton.__version__} {keys}")


def _seconds(run: Callable[[], None]) -> float:
    try:
        milliseconds: float = triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median")
    except OutOfResources:
        return math.inf
    return milliseconds / 1000


def _run_product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    out: Tensor,
    tile: Tile,
    *,
    low_rank: TokenRanks | None = None,
) -> None:
    out_channels, channels = out_channels_of(weight), weight.shape[-1]
    count = x.numel() // channels
    height, width = x.shape[-2:] if x.dim() == 4 else (1, count)
    tensors = (x, weight, scale, bias, residual, *arguments_of(low_rank), out)
    sizes = (count, height, width, channels, out_channels)
    launch(
        _product,
        (triton.cdiv(count, tile.m) * triton.cdiv(out_channels, tile.n), quarters_of(weight)),
        *tensors,
        *sizes,
        TAPS=taps_of(weight),
        **settings_of(tile, x),
    )
