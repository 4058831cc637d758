"""A group norm in Triton. The first kernel sums each channel of a channels-last map, and can join
two maps. The second turns the sums into a factor and an offset for each row and channel.

A NaN makes the sums NaN. It knows no modules; with TRITON_INTERPRET=1, set before the import, it
runs on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.pytorch.launches import launch
from engines.pytorch.slots import sides_of
from engines.pytorch.triton_shared import jit, row_sides

PROGRAMS, SPLITS = 2048, 256
"""the wanted number of programs that sum, and the most programs for a row"""
FOLDED = 32
"""splits that are added at a time"""
PIXELS, CHANNELS, WARPS = 64, 64, 4


@jit
def _sum_channels(
    x,
    beside,
    joined,
    sums,
    sides,
    pixels,
    channels,
    first,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sum each channel. With a map beside x, join both; x has the `first` channels."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits = tl.num_programs(1)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    # A sum for each place in the tile: adding them up would synchronise the program's warps.
    total = tl.zeros([PIXELS, CHANNELS], tl.float32)
    squares = tl.zeros([PIXELS, CHANNELS], tl.float32)
    height, width = row_sides(sides, row, 1, pixels)
    # A joined map gets zeros as pads, so its pads are visited too.
    until = pixels if beside is not None else height * width
    for start in range(split * PIXELS, until, splits * PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        line = (row * pixels + pixel)[:, None]
        mask = (pixel < pixels)[:, None] & (channel < channels)[None, :]
        inside = (pixel < height * width)[:, None] & (channel < channels)[None, :]
        is_first = (channel < first)[None, :]
        value = tl.load(x + line * first + channel[None, :], mask=inside & is_first, other=0.0)
        if beside is not None:
            place = line * (channels - first) + (channel - first)[None, :]
            other = tl.load(beside + place, mask=inside & (channel >= first)[None, :], other=0.0)
            value = tl.where(is_first, value, other)
            tl.store(joined + line * channels + channel[None, :], value, mask=mask)
        value = value.to(tl.float32)
        total += value
        squares += value * value
    out = sums + (row * splits + split) * 2 * channels + channel
    tl.store(out, tl.sum(total, 0), mask=channel < channels)
    tl.store(out + channels, tl.sum(squares, 0), mask=channel < channels)


@jit
def _fold_norm(
    sums,
    weight,
    bias,
    shift,
    sides,
    factor,
    offset,
    pixels,
    channels,
    per_group,
    eps,
    splits,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row, group = tl.program_id(0), tl.program_id(1)
    height, width = row_sides(sides, row, 1, pixels)
    pixels = height * width
    index = tl.arange(0, SIZE)
    channel = group * per_group + index
    mask = index < per_group
    several = tl.zeros([SPLITS, SIZE], tl.float32)
    several_squares = tl.zeros([SPLITS, SIZE], tl.float32)
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)[:, None]
        place = sums + (row * splits + split) * 2 * channels + channel[None, :]
        there = (split < splits) & mask[None, :]
        several += tl.load(place, mask=there, other=0.0)
        several_squares += tl.load(place + channels, mask=there, other=0.0)
    total, squares = tl.sum(several, 0), tl.sum(several_squares, 0)
    added = tl.zeros([SIZE], tl.float32)
    if shift is not None:
        added = tl.load(shift + row * channels + channel, mask=mask, other=0.0).to(tl.float32)
    # Convert sums of `value` into sums of `value + added`.
    squares += 2 * added * total + pixels * added * added
    total += pixels * added
    count = pixels * per_group
    mean = tl.sum(total, 0) / count
    variance = tl.sum(squares, 0) / count - mean * mean
    scale = tl.rsqrt(tl.where(variance < 0.0, 0.0, variance) + eps)
    scale = scale * tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    moved = (added - mean) * scale + tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    tl.store(factor + row * channels + channel, scale, mask=mask)
    tl.store(offset + row * channels + channel, moved, mask=mask)


def summed(x: Tensor, beside: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return a map [rows, channels, h, w], channels last, joined with the map `beside`, and the
    sums of its channels."""
    rows, first, height, width = x.shape
    channels, pixels = first + (0 if beside is None else beside.shape[1]), height * width
    dims = rows, channels, height, width
    layout: Any = {"memory_format": torch.channels_last, "device": x.device}
    joined = x if beside is None else torch.empty(dims, dtype=x.dtype, **layout)
    programs = rows * triton.cdiv(channels, CHANNELS)
    wanted = min(SPLITS, triton.cdiv(PROGRAMS, programs), triton.cdiv(pixels, PIXELS))
    splits = int(triton.next_power_of_2(wanted))
    sums, sides = x.new_empty((rows, splits, 2, channels), dtype=torch.float32), sides_of(x)
    tensors = (x, beside, joined, sums, sides)
    sizes = (pixels, channels, first)
    launch(
        _sum_channels,
        (rows, splits, triton.cdiv(channels, CHANNELS)),
        *tensors,
        *sizes,
        PIXELS=PIXELS,
        CHANNELS=CHANNELS,
        num_warps=WARPS,
    )
    return joined, sums


def folded(
    sums: Tensor,
    weight: Tensor,
    bias: Tensor,
    shift: Tensor | None,
    pixels: int,
    groups: int,
    eps: float,
    sides: Tensor | None = None,
) -> Tensor:
    """Return the factors and the offsets, [2, rows, channels]."""
    rows, splits, _, channels = sums.shape
    factor_and_offset = sums.new_empty((2, rows, channels))
    factor, offset = factor_and_offset
    tensors = (sums, weight, bias, shift, sides, factor, offset)
    sizes = (pixels, channels, channels // groups, eps, splits)
    launch(
        _fold_norm,
        (rows, groups),
        *tensors,
        *sizes,
        SPLITS=FOLDED,
        SIZE=triton.next_power_of_2(channels // groups),
    )
    return factor_and_offset
