"""A 3×3 convolution of maps in slots in 16 bits, in Triton. It is for the few convolutions that are
not in 8 bits and that descriptors cannot read, because of their stride or narrow input. It knows no
modules; with TRITON_INTERPRET=1, set before the import, it runs on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engines.pytorch.launches import launch
from engines.pytorch.slots import sides_of
from engines.pytorch.triton_shared import IS_INTERPRETED, jit, tap_offset, tile_start

M, N = (32, 32) if IS_INTERPRETED else (128, 64)
"""pixels and channels of a tile"""
LEAST, MOST = 16, 32
"""input channels at a time"""
WARPS, STAGES = 4, 3


@jit
def _slot_convolution(
    x,
    weight,
    bias,
    sides,
    out,
    count,
    pixels,
    channels,
    out_channels,
    STRIDE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    down, right = tile_start(count, out_channels, M, N)
    row = down // pixels
    height, width = tl.load(sides + 2 * row), tl.load(sides + 2 * row + 1)
    pixel, target = down - row * pixels + tl.arange(0, M), right + tl.arange(0, N)
    left, top = pixel % width, pixel // width
    start = row.to(tl.int64) * pixels * STRIDE * STRIDE
    blocks = tl.cdiv(channels, K)
    total = tl.zeros([M, N], tl.float32)
    for k in range(9 * blocks):
        tap, channel = k // blocks, (k % blocks) * K + tl.arange(0, K)
        down_by, right_by = tap_offset(tap, 0, 9)
        x_by, y_by = left * STRIDE + right_by, top * STRIDE + down_by
        inside = (top < height) & (x_by >= 0) & (x_by < width * STRIDE)
        inside = inside & (y_by >= 0) & (y_by < height * STRIDE)
        source = (start + y_by * (width * STRIDE) + x_by)[:, None] * channels + channel[None, :]
        a = tl.load(x + source, mask=inside[:, None] & (channel < channels)[None, :], other=0.0)
        place = (target[None, :] * 9 + tap) * channels + channel[:, None]
        weight_mask = (target < out_channels)[None, :] & (channel < channels)[:, None]
        total = tl.dot(a, tl.load(weight + place, mask=weight_mask, other=0.0), total)
    is_channel = target < out_channels
    total += tl.load(bias + target, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    total = tl.where((top < height)[:, None], total, 0.0)
    place = (row.to(tl.int64) * pixels + pixel)[:, None] * out_channels + target[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_channel[None, :])


def slot_convolution(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    """Convolve x [rows, channels, 1, slot], channels last, with `weight` [out, 3, 3, channels]."""
    rows, channels, _, slot = x.shape
    pixels, out_channels = slot // stride**2, weight.shape[0]
    out = x.new_empty((rows, 1, pixels, out_channels)).permute(0, 3, 1, 2)
    sides = sides_of(out)
    assert sides is not None
    tensors = (x, weight, bias, sides, out)
    sizes = (rows * pixels, pixels, channels, out_channels)
    launch(
        _slot_convolution,
        (triton.cdiv(rows * pixels, M) * triton.cdiv(out_channels, N),),
        *tensors,
        *sizes,
        STRIDE=stride,
        M=M,
        N=N,
        K=LEAST if channels <= LEAST else MOST,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out
