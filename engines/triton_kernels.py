"""What PyTorch leaves in several passes over memory, in one: Triton kernels for channels-last maps.

A group norm is two readings: sums per channel, then one multiplication and addition a value, with
SiLU and the rounding to 8 bits in the same pass. The 8-bit product serves linears and 3×3
convolutions, as an implicit matrix product whose epilogue scales, adds the bias and the residual.
It knows no modules; kernel_switch.py decides when these run. With TRITON_INTERPRET=1, set before
the import, they run on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
SPLITS = 32
"""programs that share a row's pixels while its channels are summed"""
PIXELS, CHANNELS = 32, 64
HALF_STEP = tl.constexpr(12582912.0)
"""1.5 × 2^23: adding and subtracting it rounds a float32 to the nearest whole number, halves to
even"""
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@triton.jit
def _sum_channels(x, sums, pixels, channels, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits = tl.num_programs(1)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros([CHANNELS], tl.float32)
    squares = tl.zeros([CHANNELS], tl.float32)
    for start in range(split * PIXELS, pixels, splits * PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        place = (row * pixels + pixel)[:, None] * channels + channel[None, :]
        mask = (pixel < pixels)[:, None] & (channel < channels)[None, :]
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(value, 0)
        squares += tl.sum(value * value, 0)
    out = sums + (row * splits + split) * 2 * channels + channel
    tl.store(out, total, mask=channel < channels)
    tl.store(out + channels, squares, mask=channel < channels)


@triton.jit
def _fold_norm(
    sums,
    weight,
    bias,
    shift,
    factor,
    offset,
    pixels,
    channels,
    per_group,
    eps,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
):
    row, group = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, SIZE)
    channel = group * per_group + index
    mask = index < per_group
    split = tl.arange(0, SPLITS)[:, None]
    place = sums + (row * SPLITS + split) * 2 * channels + channel[None, :]
    total = tl.sum(tl.load(place, mask=mask[None, :], other=0.0), 0)
    squares = tl.sum(tl.load(place + channels, mask=mask[None, :], other=0.0), 0)
    added = tl.zeros([SIZE], tl.float32)
    if HAS_SHIFT:
        added = tl.load(shift + row * channels + channel, mask=mask, other=0.0).to(tl.float32)
    # The sums of value + added, from the sums of value.
    squares += 2 * added * total + pixels * added * added
    total += pixels * added
    count = pixels * per_group
    mean = tl.sum(total, 0) / count
    variance = tl.sum(squares, 0) / count - mean * mean
    scale = tl.rsqrt(tl.maximum(variance, 0.0) + eps)
    scale = scale * tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    moved = (added - mean) * scale + tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    tl.store(factor + row * channels + channel, scale, mask=mask)
    tl.store(offset + row * channels + channel, moved, mask=mask)


@triton.jit
def _stored(value, largest, dtype: tl.constexpr):
    value = tl.minimum(tl.maximum(value, -largest), largest)
    if dtype == tl.int8:
        value = (value + HALF_STEP) - HALF_STEP
    return value.to(dtype)


@triton.jit
def _affine(
    x,
    factor,
    offset,
    steps,
    out,
    pixels,
    channels,
    largest,
    HAS_AFFINE: tl.constexpr,
    HAS_SILU: tl.constexpr,
    HAS_STEPS: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    place = (row * pixels + pixel)[:, None] * channels + channel[None, :]
    here = channel < channels
    mask = (pixel < pixels)[:, None] & here[None, :]
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_AFFINE:
        a = tl.load(factor + row * channels + channel, mask=here, other=0.0)
        b = tl.load(offset + row * channels + channel, mask=here, other=0.0)
        value = value * a[None, :] + b[None, :]
    if HAS_SILU:
        value = value * tl.sigmoid(value)
    if HAS_STEPS:
        value = value * tl.load(steps + channel, mask=here, other=0.0)[None, :]
        tl.store(out + place, _stored(value, largest, out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gated(x, steps, out, channels, largest, HAS_STEPS: tl.constexpr, CHANNELS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < channels
    value = tl.load(x + row * 2 * channels + channel, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(x + (row * 2 + 1) * channels + channel, mask=mask, other=0.0).to(tl.float32)
    value = value * (0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)))
    place = out + row * channels + channel
    if HAS_STEPS:
        value = value * tl.load(steps + channel, mask=mask, other=0.0)
        tl.store(place, _stored(value, largest, out.dtype.element_ty), mask=mask)
    else:
        tl.store(place, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _product(
    x,
    weight,
    scale,
    bias,
    residual,
    out,
    count,
    height,
    width,
    channels,
    out_channels,
    size_class,
    TAPS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Neighbouring programs share weights and pixels in the cache.
    across = tl.cdiv(out_channels, N)
    in_group = GROUP * across
    first = (tl.program_id(0) // in_group) * GROUP
    tall = tl.minimum(tl.cdiv(count, M) - first, GROUP)
    down = first + (tl.program_id(0) % in_group) % tall
    pixel = down * M + tl.arange(0, M)
    target = ((tl.program_id(0) % in_group) // tall) * N + tl.arange(0, N)
    left, top = pixel % width, (pixel // width) % height
    blocks = tl.cdiv(channels, K)
    total = tl.zeros([M, N], tl.int32 if IS_WHOLE else tl.float32)
    for k in range(TAPS * blocks):
        tap, channel = k // blocks, (k % blocks) * K + tl.arange(0, K)
        right_by = tap % 3 - 1 if TAPS == 9 else 0
        down_by = tap // 3 - 1 if TAPS == 9 else 0
        inside = (left + right_by >= 0) & (left + right_by < width) & (pixel < count)
        inside = inside & (top + down_by >= 0) & (top + down_by < height)
        source = (pixel + down_by * width + right_by).to(tl.int64)[:, None] * channels
        seen = inside[:, None] & (channel < channels)[None, :]
        a = tl.load(x + source + channel[None, :], mask=seen, other=0.0)
        place = (target[None, :] * TAPS + tap) * channels + channel[:, None]
        held = (target < out_channels)[None, :] & (channel < channels)[:, None]
        b = tl.load(weight + place, mask=held, other=0.0)
        total = tl.dot(a, b, total)
    is_there = target < out_channels
    value = total.to(tl.float32) * tl.load(scale + target, mask=is_there, other=0.0)[None, :]
    value += tl.load(bias + target, mask=is_there, other=0.0)[None, :]
    place = pixel.to(tl.int64)[:, None] * out_channels + target[None, :]
    mask = (pixel < count)[:, None] & is_there[None, :]
    if HAS_RESIDUAL:
        value += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


def _config(m: int, n: int, k: int, warps: int, stages: int) -> Any:
    return triton.Config({"M": m, "N": n, "K": k, "GROUP": 8}, num_warps=warps, num_stages=stages)


SMALL = [_config(32, 32, 32, 4, 1)]
TILES = [
    _config(128, 256, 64, 8, 4),
    _config(128, 128, 128, 8, 3),
    _config(128, 128, 64, 4, 4),
    _config(128, 64, 128, 4, 4),
    _config(64, 64, 128, 4, 4),
]
_tuned_product = triton.autotune(
    SMALL if IS_INTERPRETED else TILES, key=["size_class", "channels", "out_channels", "TAPS"]
)(_product)


def norm_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
    *,
    has_silu: bool,
    shift: Tensor | None = None,
    steps: Tensor | None = None,
    number: torch.dtype | None = None,
) -> Tensor:
    """x is [rows, channels, h, w], channels last; `shift` [rows, channels] is added to it first."""
    rows, channels, height, width = x.shape
    pixels, per_group = height * width, channels // groups
    sums = x.new_empty((rows, SPLITS, 2, channels), dtype=torch.float32)
    grid = (rows, SPLITS, triton.cdiv(channels, CHANNELS))
    _sum_channels[grid](x, sums, pixels, channels, PIXELS=PIXELS, CHANNELS=CHANNELS)
    factor, offset = x.new_empty((2, rows, channels), dtype=torch.float32)
    _fold_norm[(rows, groups)](
        sums,
        weight,
        bias,
        weight if shift is None else shift,
        factor,
        offset,
        pixels,
        channels,
        per_group,
        eps,
        SPLITS=SPLITS,
        SIZE=triton.next_power_of_2(per_group),
        HAS_SHIFT=shift is not None,
    )
    return affine(x, factor, offset, has_silu=has_silu, steps=steps, number=number)


def affine(
    x: Tensor,
    factor: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    has_silu: bool = False,
    steps: Tensor | None = None,
    number: torch.dtype | None = None,
) -> Tensor:
    """x * factor + offset by row and channel, SiLU, and rounding to `number` in `steps` a unit;
    channels are the last dimension in memory: a map in channels-last, or tokens."""
    if x.dim() == 4:
        rows, channels, pixels = x.shape[0], x.shape[1], x.shape[2] * x.shape[3]
    else:
        rows, channels, pixels = 1, x.shape[-1], x.numel() // x.shape[-1]
    out = torch.empty_like(x, dtype=number or x.dtype)
    grid = (rows, triton.cdiv(pixels, PIXELS), triton.cdiv(channels, CHANNELS))
    _affine[grid](
        x,
        x if factor is None else factor,
        x if offset is None else offset,
        x if steps is None else steps,
        out,
        pixels,
        channels,
        LARGEST.get(out.dtype, 0.0),
        HAS_AFFINE=factor is not None,
        HAS_SILU=has_silu,
        HAS_STEPS=steps is not None,
        PIXELS=PIXELS,
        CHANNELS=CHANNELS,
    )
    return out


def gated(x: Tensor, *, steps: Tensor | None = None, number: torch.dtype | None = None) -> Tensor:
    """The first half of the last dimension times the GELU of the second."""
    channels = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], channels), dtype=number or x.dtype)
    size = min(1024, triton.next_power_of_2(channels))
    _gated[(out.numel() // channels, triton.cdiv(channels, size))](
        x,
        x if steps is None else steps,
        out,
        channels,
        LARGEST.get(out.dtype, 0.0),
        HAS_STEPS=steps is not None,
        CHANNELS=size,
    )
    return out


def product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    dtype: torch.dtype,
    residual: Tensor | None = None,
) -> Tensor:
    """x 8-bit: tokens [..., channels] with a weight [out, channels], or a channels-last map
    [rows, channels, h, w] with a weight [out, 3, 3, channels]."""
    is_map = x.dim() == 4
    channels, out_channels = weight.shape[-1], weight.shape[0]
    count = x.numel() // channels
    height, width = x.shape[-2:] if is_map else (1, count)
    if is_map:
        out = torch.empty(
            (x.shape[0], out_channels, height, width),
            dtype=dtype,
            device=x.device,
            memory_format=torch.channels_last,
        )
    else:
        out = torch.empty((*x.shape[:-1], out_channels), dtype=dtype, device=x.device)
    _tuned_product[
        lambda tile: (triton.cdiv(count, tile["M"]) * triton.cdiv(out_channels, tile["N"]),)
    ](
        x,
        weight,
        scale,
        bias,
        out if residual is None else residual,
        out,
        count,
        height,
        width,
        channels,
        out_channels,
        count.bit_length(),
        TAPS=9 if is_map else 1,
        HAS_RESIDUAL=residual is not None,
        IS_WHOLE=x.dtype == torch.int8,
    )
    return out
