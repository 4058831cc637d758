"""The feed-forward's first product with its GEGLU, rounded for the second product. Descriptors read
both factors, for GPUs with a tensor memory accelerator, Hopper and later.

A tile has values and their gates, and each thread has both halves of its pairs. It knows no
modules; with TRITON_INTERPRET=1, set before the import, it runs on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engines.pytorch.launches import LARGEST, launch
from engines.pytorch.tiles import Tile
from engines.pytorch.triton_low_rank import TokenRanks, arguments_of, lora_sums, rows_of_tile
from engines.pytorch.triton_shared import jit, scaled, settings_of, store_rounded_lines, tile_start

SHARE = tl.constexpr((-1.0097, -1.0771, -0.5502, -0.01275))
"""coefficients of log2(share(-a)), where share is the normal distribution function. The share is
within 0.7% from 0 to 5; beyond, a × share is at most 1e-6. E4M3 rounds to 6%."""


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
    HAS_LORAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    HALF: tl.constexpr = N // 2
    down, right = tile_start(count, out_channels, M, HALF)
    total = tl.zeros([M, N], tl.int32 if IS_WHOLE else tl.float32)
    if HAS_LORAS:
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
    sizes, strides = [2, out_channels, channels], [out_channels * channels, channels, 1]
    launch(
        _gated_product,
        (triton.cdiv(count, tile.m) * triton.cdiv(out_channels, half),),
        scale,
        bias,
        TensorDescriptor(x, [count, channels], [channels, 1], [tile.m, tile.k]),
        TensorDescriptor(weight, sizes, strides, [2, half, tile.k]),
        flags,
        scale if lora_scale is None else lora_scale,
        *arguments_of(low_rank, scale),
        out,
        x.shape[1],
        count,
        channels,
        out_channels,
        LARGEST[out.dtype],
        HAS_LORAS=low_rank is not None,
        **settings_of(tile, x),
    )
